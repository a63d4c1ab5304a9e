"""Layers that compute in training as they will in INT8, with the ranges of what they read learned on the way.

Esser et al., Learned Step Size Quantization (2019), and Bhalgat et al., LSQ+ (2020), for ranges that do not begin at
zero: rounding passes gradients through, and a value that was clipped moves the end that clipped it.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d, linear
from transformers.pytorch_utils import Conv1D

from laconic.models.signature import replace_forward
from laconic.quantization.plan import Range
from laconic.quantization.qparams import LARGEST

LEVELS = 255
PACE = 10.0
"""How much faster a range is learned than a weight: in a step of 1e-4 it moves by a thousandth."""


class LearnedRange(nn.Module):
    """The unsigned grid over a range, as `laconic.quantization.qparams.rounded_activation` has it; the ends learn, and
    an end that is zero stays there."""

    def __init__(self, limits: Range) -> None:
        super().__init__()
        ends = torch.tensor([min(limits.low, 0.0), max(limits.high, 0.0)], dtype=torch.float32)
        self.register_buffer("start", ends)
        self.growth = nn.Parameter(torch.zeros(2))

    @property
    def ends(self) -> Tensor:
        """The lowest and the highest value, [2] float32."""
        start: Tensor = self.start  # type: ignore[assignment]
        return start * torch.exp(PACE * self.growth)

    @property
    def limits(self) -> Range:
        """The range as it is now."""
        low, high = self.ends.tolist()
        return Range(low, high)

    def forward(self, values: Tensor) -> Tensor:
        """Values on the grid, of the same shape and dtype."""
        low, high = scaled(self.ends, 1 / sqrt(values.numel() * LEVELS)).unbind()
        step = ((high - low) / LEVELS).clamp(min=1e-30)
        zero = rounded(-low / step).clamp(0, LEVELS)
        integers = (rounded(values.float() / step) + zero).clamp(0, LEVELS)
        return ((integers - zero) * step).to(values.dtype)


def rounded(values: Tensor) -> Tensor:
    """Rounded to the nearest; the gradient passes as if they were not (Bengio et al., 2013)."""
    return values + (values.round() - values).detach()


def scaled(values: Tensor, share: float) -> Tensor:
    """The same values, with that share of the gradient: many values pull at one range."""
    return values * share + (values * (1 - share)).detach()


def rounded_weight(weight: Tensor, axis: int) -> Tensor:
    """A weight on the grid that placement writes it on, one scale a slice along `axis`; the gradient passes."""
    others = [other for other in range(weight.ndim) if other != axis]
    step = (weight.detach().abs().amax(dim=others, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return rounded(weight / step) * step


def multiplies(layer: nn.Module) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What a layer computes of its input and a weight in the place of its own; None for one that is left as it is."""
    if isinstance(layer, Conv1D):
        return lambda x, w: x @ w + layer.bias
    if type(layer) is nn.Linear:
        return lambda x, w: linear(x, w, layer.bias)
    if type(layer) in (nn.Conv1d, nn.Conv2d) and layer.padding_mode == "zeros":
        convolve: Any = conv1d if isinstance(layer, nn.Conv1d) else conv2d
        return lambda x, w: convolve(x, w, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    return None


def attach(layer: nn.Module, learned: LearnedRange) -> Callable[[], None]:
    """Let a layer compute with its input and its weight on their grids; gives what takes that off again."""
    multiply = multiplies(layer)
    assert multiply is not None
    axis = 1 if isinstance(layer, Conv1D) else 0

    def forward(values: Tensor) -> Tensor:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return multiply(learned(values), rounded_weight(weight, axis))

    return replace_forward(layer, forward)
