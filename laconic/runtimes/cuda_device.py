"""A CUDA device: its description, streams, graphs, and buffers in pinned host memory and on the device."""

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import runtime as cuda

from laconic.arrays import Array
from laconic.errors import RuntimeFailure
from laconic.runtimes.device_policy import grow

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Where Linux tells the version of NVIDIA's kernel module."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, its compute capability ("9.0"), and its driver."""

    name: str
    capability: str
    driver: str


def find_gpu() -> Gpu:
    """Describe the first GPU. Raises RuntimeFailure without a GPU, or with a driver that is missing or too old."""
    supported, needed = check(cuda.cudaDriverGetVersion()), check(cuda.cudaRuntimeGetVersion())
    if not supported:
        raise RuntimeFailure("this machine has no NVIDIA driver. Install one, or try another engine (--runtime)")
    if supported // 1000 < needed // 1000:
        raise RuntimeFailure(
            f"the NVIDIA driver supports CUDA {format_version(supported)}, expected {needed // 1000} or later. Update "
            f"the driver"
        )
    check(cuda.cudaGetDeviceCount())
    properties = check(cuda.cudaGetDeviceProperties(0))
    module = re.search(r"\d{3}\.\d+(\.\d+)?", DRIVER_FILE.read_text()) if DRIVER_FILE.is_file() else None
    driver = f"CUDA {format_version(supported)}" + (f", {module[0]}" if module else "")
    return Gpu(properties.name.decode(), f"{properties.major}.{properties.minor}", driver)


def format_version(number: int) -> str:
    """Format a version of CUDA, 13020: `13.2`."""
    return f"{number // 1000}.{number % 1000 // 10}"


def check(result: tuple[Any, ...]) -> Any:
    """Return the value of a CUDA call. Raises RuntimeFailure if it failed."""
    error, *values = result
    if error != cuda.cudaError_t.cudaSuccess:
        raise RuntimeFailure(explain_error(error))
    return values[0] if values else None


def explain_error(error: Any) -> str:
    """Explain an error of CUDA."""
    errors = cuda.cudaError_t
    if error == errors.cudaErrorMemoryAllocation:
        return (
            "the GPU or the pinned host memory has too little room. Give smaller bounds (shapes) or a smaller batch, "
            "or stop other programs on the GPU"
        )
    if error == errors.cudaErrorNoDevice:
        return "this machine has no NVIDIA GPU. Try another engine (--runtime)"
    if error == errors.cudaErrorInsufficientDriver:
        return "the NVIDIA driver is missing or too old. Install a later one, or try another engine (--runtime)"
    return f"CUDA failed: {error.name}. Run again; if it stays, update the driver"


class CudaGraph:
    """A CUDA graph that can be launched: the work that a stream recorded."""

    def __init__(self, recorded: Any) -> None:
        """recorded: what the stream captured; it is released here."""
        try:
            self._graph = check(cuda.cudaGraphInstantiate(recorded, 0))
        finally:
            cuda.cudaGraphDestroy(recorded)

    def launch(self, stream: "CudaStream") -> None:
        """Run the recorded work on a stream."""
        check(cuda.cudaGraphLaunch(self._graph, stream.handle))

    def close(self) -> None:
        """Release the graph."""
        cuda.cudaGraphExecDestroy(self._graph)


class CudaStream:
    """A queue of work on the device. handle: CUDA's own."""

    def __init__(self) -> None:
        self.handle = check(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))

    def synchronize(self) -> None:
        """Wait for the work on this stream."""
        check(cuda.cudaStreamSynchronize(self.handle))

    def begin_capture(self) -> None:
        """Record the work that follows instead of running it."""
        check(cuda.cudaStreamBeginCapture(self.handle, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))

    def end_capture(self) -> CudaGraph:
        """Stop recording. Raises RuntimeFailure if something was asked for that cannot be recorded."""
        return CudaGraph(check(cuda.cudaStreamEndCapture(self.handle)))

    def close(self) -> None:
        """Release the stream."""
        cuda.cudaStreamDestroy(self.handle)


class DeviceMemory:
    """Memory on the device. address: its pointer; size: bytes."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self.address = int(check(cuda.cudaMalloc(self.size)))

    def close(self) -> None:
        """Release the memory."""
        cuda.cudaFree(self.address)


class PinnedBuffer:
    """The same bytes in pinned host memory and on the device, copied by a stream."""

    def __init__(self, size: int) -> None:
        self.device = DeviceMemory(size)
        try:
            self._host = int(check(cuda.cudaMallocHost(self.device.size)))
        except RuntimeFailure:
            self.device.close()
            raise
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.device.size).from_address(self._host))

    @property
    def size(self) -> int:
        """Bytes that the buffer holds."""
        return self.device.size

    def write(self, array: Array) -> None:
        """Copy an array into the host memory; it need not lie in one piece."""
        np.copyto(self._bytes[: array.nbytes].view(array.dtype).reshape(array.shape), array)

    def read(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Copy an array out of the host memory."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array: Array = self._bytes[:size].view(dtype).reshape(shape).copy()
        return array

    def upload(self, size: int, stream: CudaStream) -> None:
        """Queue the copy of the first bytes to the device."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        check(cuda.cudaMemcpyAsync(self.device.address, self._host, size, kind, stream.handle))

    def download(self, size: int, stream: CudaStream) -> None:
        """Queue the copy of the first bytes from the device."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        check(cuda.cudaMemcpyAsync(self._host, self.device.address, size, kind, stream.handle))

    def close(self) -> None:
        """Release both memories."""
        self.device.close()
        cuda.cudaFreeHost(self._host)


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
        """Count the bytes of a tensor of this shape."""
        return int(np.prod(shape)) * int(np.dtype(self._dtypes[name]).itemsize)

    def reserve(self, name: str, shape: Shape, most: int = UNBOUNDED) -> int:
        """Reserve room for this shape, and return the device address of its buffer. most: bytes of the largest that can
        be asked for."""
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
