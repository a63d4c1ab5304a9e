"""Running the same code twice with the same result: the numbers it draws, and the precision that is in force."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dice:
    """The state of the random numbers, on the CPU and on one GPU."""

    cpu: Tensor
    gpu: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "Dice":
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def lay(self, device: torch.device) -> None:
        """Draw from here on what was drawn then."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)


@contextmanager
def borrowed(device: torch.device) -> Iterator[None]:
    """Whatever is drawn in the body, what comes after draws as if it had not been."""
    before = Dice.now(device)
    try:
        yield
    finally:
        before.lay(device)


@dataclass(frozen=True)
class Precision:
    """Autocast as it was in force."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> "Precision":
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> torch.autocast:
        """The same, but no casted weight outlives the body: kept, they would be a second copy of the model."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
