"""Host memory, where tensors are kept that the device does not need at present."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from train.offload.memory_accounting import Category, account_as


@dataclass(eq=False)
class HostMemory:
    """Copies tensors between a device and its host.

    On a GPU copies go through pinned memory on a CUDA stream of their own, so that they overlap with computation. Where
    the device is the host itself, a copy is made all the same, and counted.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an uninitialized tensor on the host, of the shape of `tensor`; in pinned memory beside a GPU."""
        with account_as("host"):
            pinned = self._stream is not None
            return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu", pin_memory=pinned)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host; it may be read after `synchronize`, and passed to `copy_to_device` at once."""
        copied = self.empty_like(tensor)
        if self._stream is None:
            with account_as("host", copying=True):
                return copied.copy_(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            copied.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
        return copied

    def copy_to_device(
        self, tensor: Tensor, *, dtype: torch.dtype | None = None, category: Category | None = None
    ) -> Tensor:
        """Copy a tensor to the device, where it may be used after `wait`."""
        with account_as("device", category, copying=True):
            if self._stream is None:
                return tensor.to(self.device, dtype=dtype or tensor.dtype, copy=True)
            with torch.cuda.stream(self._stream):
                copied = tensor.to(self.device, dtype=dtype or tensor.dtype, non_blocking=True, copy=True)
            copied.record_stream(torch.cuda.current_stream(self.device))
            return copied

    def wait(self) -> None:
        """Make the device's later computation wait for the copies that were started."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Block until all copies to the host have arrived."""
        if self._stream is not None:
            self._stream.synchronize()


def account_steps_on_host(optimizer: Optimizer, after_step: Callable[[], None] | None = None) -> Optimizer:
    """Count what an optimizer allocates and computes in its steps as the host's; `after_step` follows each of them."""
    stack = ExitStack()

    def before(*_: Any) -> None:
        stack.enter_context(account_as("host"))

    def after(*_: Any) -> None:
        if after_step is not None:
            after_step()
        stack.close()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer
