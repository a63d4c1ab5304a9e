"""Products in 16 bits, weights and loss in FP32 (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from laconic.training.step.step_parts import StepParts
from laconic.training.step.technique import Slot, Technique


class Bf16(Technique):
    """Products in BF16, which has the range of FP32 and 8 bits of mantissa."""

    slot: ClassVar[Slot] = "precision"
    exact: ClassVar[bool] = False

    def apply(self, parts: StepParts) -> None:
        parts.add_forward_context(lambda: autocast(parts.device, torch.bfloat16))


class Fp16(Technique):
    """Products in FP16, and a loss that is scaled up, so that small gradients do not fall below its range.

    scale: of the loss, at first; doubled after `interval` steps without an overflow, halved and the step left out after
    one.
    """

    slot: ClassVar[Slot] = "precision"
    exact: ClassVar[bool] = False
    excludes: ClassVar[Mapping[str, str]] = {"shard": "each rank would judge its loss scale by its own shards"}

    scale: float = Field(default=2.0**16, gt=0)
    interval: int = Field(default=2000, ge=1)

    def apply(self, parts: StepParts) -> None:
        parts.add_forward_context(lambda: autocast(parts.device, torch.float16))
        parts.scale_loss(torch.amp.GradScaler(parts.device.type, init_scale=self.scale, growth_interval=self.interval))


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Without torch's cache, which holds a copy of every weight until the pass ends: with checkpoint, where no graph
    holds them, that is half of the weights' bytes for nothing. Only a layer that is used twice is cast twice."""
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)
