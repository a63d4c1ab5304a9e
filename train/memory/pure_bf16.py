"""Pure BF16: weights, gradients and matrix products in BF16, without FP32 master weights."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import nn

from train.step.cast_inputs import cast_inputs_to_bf16
from train.step.step_parts import StepParts
from train.step.technique import Technique


class PureBf16(Technique):
    """Takes 2 bytes per weight and 2 per gradient. The optimizer must round stochastically: a BF16 weight that is
    rounded to nearest does not move under updates below 1/256 of it (Zamirai et al., arXiv 2010.06192).

    Normalizations with running statistics stay in FP32 as a whole, and so do all buffers. Gradients of several
    micro-batches are accumulated in BF16.
    """

    slot = "precision"
    exact = False
    excludes: ClassVar[Mapping[str, str]] = {
        "host-weights": "it keeps FP32 weights on the host, and BF16 copies on the device by itself",
        "ema": "an average in BF16 does not move by the small part that a step has in it",
        "zero": "DeepSpeed takes float32 weights",
    }
    requires_of_optimizer = ("stochastic-rounding",)

    @property
    def multiplies_in_bf16(self) -> bool:
        return True

    def apply(self, parts: StepParts) -> None:
        changed: dict[int, nn.Parameter] = {}
        for part in parts.module.modules():
            weights = [weight for weight in part.parameters(recurse=False) if weight.dtype is torch.float32]
            if not weights or getattr(part, "running_mean", None) is not None:
                continue
            changed |= {id(weight): weight for weight in weights}
            hook = part.register_forward_pre_hook(cast_inputs_to_bf16, with_kwargs=True)
            parts.on_restore(hook.remove)
        convert(changed.values(), torch.bfloat16)
        parts.on_restore(lambda: convert(changed.values(), torch.float32))


def convert(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Change the dtype of parameters in place: they stay the same objects."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
