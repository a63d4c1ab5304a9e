"""State that recomputation must restore to give the same result: random number generators and autocast."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from train.offload.memory_accounting import account_as


@dataclass(frozen=True)
class RngState:
    """The state of torch's random number generators, on the CPU and on one GPU."""

    cpu: Tensor
    gpu: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> "RngState":
        """Capture the present state. It lies on the host, a GPU's as well: 5 KB for each layer and micro-batch."""
        with account_as("host"):
            return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        """Draw from here on the numbers that were drawn after `capture`."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the state of the generators after the body."""
    before = RngState.capture(device)
    try:
        yield
    finally:
        before.restore(device)


@dataclass(frozen=True)
class AutocastState:
    """Whether autocast is enabled, and to which dtype."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls, device: torch.device) -> "AutocastState":
        """Capture the present state."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def restore(self) -> torch.autocast:
        """Make a context with this state, but without autocast's cache: cast weights would be a second copy of the
        model."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
