"""Products in 16 bits, weights and loss in FP32 (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from laconic.training.step.parts import Kit
from laconic.training.step.technique import Proposal, Slot, Technique


class Bf16(Technique):
    """Products in BF16, which has the range of FP32 and 8 bits of mantissa."""

    slot: ClassVar[Slot] = "precision"
    exact: ClassVar[bool] = False

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return (Proposal("grid"),) if has_bf16(device) else ()

    def apply(self, kit: Kit) -> None:
        kit.forward.append(lambda: autocast(kit, torch.bfloat16))


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

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return () if has_bf16(device) else (Proposal("grid"),)

    def apply(self, kit: Kit) -> None:
        kit.forward.append(lambda: autocast(kit, torch.float16))
        kit.scaler = torch.amp.GradScaler(kit.device.type, init_scale=self.scale, growth_interval=self.interval)


def has_bf16(device: torch.device) -> bool:
    """Whether a device computes in BF16."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported()


def autocast(kit: Kit, dtype: torch.dtype) -> torch.autocast:
    """Without torch's cache, which holds a copy of every weight until the pass ends: with checkpoint, where no graph
    holds them, that is half of the weights' bytes for nothing. Only a layer that is used twice is cast twice."""
    return torch.autocast(kit.device.type, dtype=dtype, cache_enabled=False)
