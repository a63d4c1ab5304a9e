"""In-place activation functions, which overwrite their input with their result."""

from functools import partial
from itertools import pairwise

from torch import nn

from laconic.errors import RecipeError
from train.step.step_parts import StepParts
from train.step.technique import Technique

GRADIENT_FROM_OUTPUT = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.Hardtanh)
"""Functions whose gradient is computed from their output. Others (SiLU, Mish) would save a copy of their input."""
GRADIENT_FROM_INPUT = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm),
)
"""Layers whose gradient never needs their output, so that it may be overwritten."""


class InplaceActivations(Technique):
    """Runs ReLU and similar functions in place, where they follow a linear layer, a convolution or a normalization
    within a Sequential: there nothing else can hold the input.

    It saves one tensor while the function runs: neither the layer before saves its output, nor the function its input.
    For a CNN on 32 images of 224 x 224 it saves 98 of 2,874 MiB in the forward pass, and nothing at the peak.
    """

    slot = "activations"
    exact = True

    def apply(self, parts: StepParts) -> None:
        functions = [
            after
            for part in parts.module.modules()
            if isinstance(part, nn.Sequential)
            for before, after in pairwise(part)
            if isinstance(before, GRADIENT_FROM_INPUT) and isinstance(after, GRADIENT_FROM_OUTPUT) and not after.inplace
        ]
        if not functions:
            raise RecipeError(
                "inplace-activations: no ReLU, LeakyReLU, ELU, CELU or Hardtanh follows a linear layer, a convolution "
                "or a normalization within a Sequential. Remove it"
            )
        for function in functions:
            function.inplace = True
            parts.on_restore(partial(setattr, function, "inplace", False))
