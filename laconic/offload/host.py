"""The memory beside the device's own: where tensors wait that the device does not need now."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.offload.memory_accounting import Category, accounted


@dataclass(eq=False)
class Host:
    """Copies between a device and its host. On a GPU they go through pinned memory on a stream of their own, so that
    they overlap with the computation; where the device is the host, a copy is a copy all the same, and counted."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def empty(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Room on the host for a tensor like this one."""
        with accounted("host"):
            return torch.empty(like.shape, dtype=dtype or like.dtype, device="cpu", pin_memory=self._stream is not None)

    def put(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """A copy on the host; it may be read there after `settle`, and taken back at once."""
        into = self.empty(tensor) if into is None else into
        if self._stream is None:
            with accounted("host", copying=True):
                return into.copy_(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            into.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
        return into

    def get(self, tensor: Tensor, *, dtype: torch.dtype | None = None, category: Category | None = None) -> Tensor:
        """A copy on the device; it may be used after `wait`."""
        with accounted("device", category, copying=True):
            if self._stream is None:
                return tensor.to(self.device, dtype=dtype or tensor.dtype, copy=True)
            with torch.cuda.stream(self._stream):
                copied = tensor.to(self.device, dtype=dtype or tensor.dtype, non_blocking=True, copy=True)
            copied.record_stream(torch.cuda.current_stream(self.device))
            return copied

    def wait(self) -> None:
        """Let the computation begin only after the copies that were asked for."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def settle(self) -> None:
        """Let the host read what was put."""
        if self._stream is not None:
            self._stream.synchronize()
