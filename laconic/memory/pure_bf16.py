"""Weights, gradients and products in BF16, and nothing in FP32 beside them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.training.step.cast_inputs import cast_inputs_to_bf16
from laconic.training.step.step_parts import StepParts
from laconic.training.step.technique import Slot, Technique


class PureBf16(Technique):
    """2 bytes for a weight and 2 for its gradient. The optimizer must round stochastically: a weight in BF16 rounded to
    nearest stands still under updates below 1/256 of it (Zamirai et al., arXiv 2010.06192).

    Normalisations with running statistics stay in FP32 as a whole, and so do all buffers. Gradients of several parts
    of a batch add up in BF16.
    """

    slot: ClassVar[Slot] = "precision"
    exact: ClassVar[bool] = False
    excludes: ClassVar[Mapping[str, str]] = {
        "host-weights": "it keeps weights in FP32 on the host, and has copies in BF16 on the device by itself",
    }
    requires_of_optimizer: ClassVar[Sequence[str]] = ("stochastic-rounding",)

    def apply(self, parts: StepParts) -> None:
        changed: dict[int, nn.Parameter] = {}
        for part in parts.module.modules():
            own = [one for one in part.parameters(recurse=False) if one.dtype is torch.float32]
            if not own or getattr(part, "running_mean", None) is not None:
                continue
            changed |= {id(one): one for one in own}
            hook = part.register_forward_pre_hook(cast_inputs_to_bf16, with_kwargs=True)
            parts.on_restore(hook.remove)
        convert(changed.values(), torch.bfloat16)
        parts.on_restore(lambda: convert(changed.values(), torch.float32))


def convert(parameters: Any, dtype: torch.dtype) -> None:
    """Change the precision of parameters, which stay the objects that they are."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
