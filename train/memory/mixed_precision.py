"""Mixed precision: matrix products in 16 bits, FP32 weights and loss (Micikevicius et al., arXiv 1710.03740)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from train.step.step_parts import StepParts
from train.step.technique import Proposal, Technique


class Bf16(Technique):
    """Mixed precision in BF16, which has the range of FP32 and 8 bits of mantissa."""

    slot = "precision"
    exact = False
    takes_parts_of_layers = True

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return (Proposal("grid"),) if has_bf16(device) else ()

    @property
    def multiplies_in_bf16(self) -> bool:
        return True

    def apply(self, parts: StepParts) -> None:
        parts.add_forward_context(lambda: autocast(parts, torch.bfloat16))


class Fp16(Technique):
    """Mixed precision in FP16 with loss scaling, so that small gradients do not underflow.

    init_scale: the loss scale of the first step. It is doubled after `growth_interval` steps without an overflow; after
    an overflow it is halved and the step is skipped.
    """

    slot = "precision"
    exact = False
    excludes: ClassVar[Mapping[str, str]] = {"shard": "each rank would judge its loss scale by its own shards"}
    renamed: ClassVar[Mapping[str, str]] = {"scale": "init_scale", "interval": "growth_interval"}

    init_scale: float = Field(default=2.0**16, gt=0)
    growth_interval: int = Field(default=2000, ge=1)

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return () if has_bf16(device) else (Proposal("grid"),)

    def apply(self, parts: StepParts) -> None:
        parts.add_forward_context(lambda: autocast(parts, torch.float16))
        scaler = torch.amp.GradScaler(
            parts.device.type, init_scale=self.init_scale, growth_interval=self.growth_interval
        )
        parts.scale_loss(scaler)


def has_bf16(device: torch.device) -> bool:
    """Return whether a device computes in BF16."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported()


def autocast(parts: StepParts, dtype: torch.dtype) -> torch.autocast:
    """Make an autocast context without torch's weight cache, which holds a copy of every weight until the pass ends:
    with gradient checkpointing, where no graph holds them, that is half of the weights' bytes for nothing. Only a layer
    that is used twice is cast twice."""
    return torch.autocast(parts.device.type, dtype=dtype, cache_enabled=False)
