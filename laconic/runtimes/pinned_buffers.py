"""The inputs and outputs of a session on a GPU: buffers that are allocated once and grow to the largest request."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from laconic.arrays import Array
from laconic.errors import RuntimeFailure
from laconic.runtimes.cuda_device import CudaStream, PinnedBuffer
from laconic.runtimes.device_policy import grow

Shape = tuple[int, ...]
UNBOUNDED = 2**62


class PinnedBuffers:
    """By the name of an input or output, a buffer in pinned host memory and on the device.

    The addresses stay until a larger request comes, so that CUDA graphs, which hold addresses, can be replayed.
    """

    def __init__(self, engine: str, dtypes: Mapping[str, Any], on_move: Callable[[], None]) -> None:
        """engine: its name, for messages. dtypes: numpy's, of all inputs and outputs. on_move: called before a buffer
        gets another address, to forget what holds the old one."""
        self._engine = engine
        self._dtypes = dtypes
        self._on_move = on_move
        self._buffers: dict[str, PinnedBuffer] = {}

    def size_of(self, name: str, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape."""
        return int(np.prod(shape)) * int(np.dtype(self._dtypes[name]).itemsize)

    def reserve(self, name: str, shape: Shape, most: int = UNBOUNDED) -> int:
        """The device address of a buffer with room for this shape. most: bytes of the largest that can be asked for."""
        held = self._buffers[name].size if name in self._buffers else 0
        size = grow(self.size_of(name, shape), held, most)
        if size > held or name not in self._buffers:
            self._on_move()
            if name in self._buffers:
                self._buffers.pop(name).close()
            self._buffers[name] = PinnedBuffer(size)
        return self._buffers[name].device.address

    def check(self, inputs: Mapping[str, Array], names: Sequence[str]) -> None:
        """Raise RuntimeFailure for inputs that have other names or types."""
        if set(inputs) != set(names):
            raise RuntimeFailure(f"{self._engine}: the inputs are {sorted(inputs)}, expected {sorted(names)}")
        for name, array in inputs.items():
            if array.dtype != self._dtypes[name]:
                raise RuntimeFailure(
                    f"{self._engine}: input {name!r} is {array.dtype}, expected {np.dtype(self._dtypes[name])}"
                )

    def write(self, inputs: Mapping[str, Array]) -> None:
        """Copy arrays into the host memory."""
        for name, array in inputs.items():
            self._buffers[name].write(array)

    def read(self, shapes: Mapping[str, Shape]) -> dict[str, Array]:
        """Copy arrays out of the host memory: the next run does not overwrite them."""
        return {name: self._buffers[name].read(shape, self._dtypes[name]) for name, shape in shapes.items()}

    def upload(self, shapes: Mapping[str, Shape], stream: CudaStream) -> None:
        """Queue the copies to the device."""
        for name, shape in shapes.items():
            self._buffers[name].upload(self.size_of(name, shape), stream)

    def download(self, shapes: Mapping[str, Shape], stream: CudaStream) -> None:
        """Queue the copies from the device."""
        for name, shape in shapes.items():
            self._buffers[name].download(self.size_of(name, shape), stream)

    def close(self) -> None:
        """Release all memory."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
