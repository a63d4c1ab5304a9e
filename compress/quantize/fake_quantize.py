"""Fake quantization for training: layers round their inputs and weights as in INT8, with learned activation ranges.

Learned step size quantization, LSQ (Esser et al., 2019), and LSQ+ for asymmetric ranges (Bhalgat et al., 2020):
gradients pass rounding by the straight-through estimator, and a clipped value moves the end that clipped it.
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
from laconic.quantization.qparams import INT8_MAX

Operation = Callable[[Tensor, Tensor], Tensor]
"""What a layer computes of its input and its weight."""

LEVELS = 255
RANGE_SPEEDUP = 10.0
"""How much faster a range is learned than a weight: a step of 1e-4 moves it by a thousandth."""


class LearnedRange(nn.Module):
    """Fake quantization of activations to uint8 over a learned range; an end that starts at zero stays there.

    It computes the same as `laconic.quantization.qparams.fake_quantize_activation`.
    """

    def __init__(self, limits: Range) -> None:
        super().__init__()
        ends = torch.tensor([min(limits.low, 0.0), max(limits.high, 0.0)], dtype=torch.float32)
        self.register_buffer("start", ends)
        self.growth = nn.Parameter(torch.zeros(2))

    @property
    def ends(self) -> Tensor:
        """The lowest and the highest value, [2] float32."""
        start: Tensor = self.start  # type: ignore[assignment]
        return start * torch.exp(RANGE_SPEEDUP * self.growth)

    @property
    def limits(self) -> Range:
        """The current range."""
        low, high = self.ends.tolist()
        return Range(low, high)

    def forward(self, values: Tensor) -> Tensor:
        """Return quantized and dequantized values, of the same shape and dtype."""
        low, high = scale_gradient(self.ends, 1 / sqrt(values.numel() * LEVELS)).unbind()
        step = ((high - low) / LEVELS).clamp(min=1e-30)
        zero = round_ste(-low / step).clamp(0, LEVELS)
        integers = (round_ste(values.float() / step) + zero).clamp(0, LEVELS)
        return ((integers - zero) * step).to(values.dtype)


def round_ste(values: Tensor) -> Tensor:
    """Round to nearest with a straight-through gradient (Bengio et al., 2013)."""
    return values + (values.round() - values).detach()


def scale_gradient(values: Tensor, share: float) -> Tensor:
    """Return the same values with a share of the gradient: many values contribute to the gradient of one range."""
    return values * share + (values * (1 - share)).detach()


def fake_quantize_weight(weight: Tensor, axis: int) -> Tensor:
    """Quantize and dequantize a weight to INT8 with one scale per slice along `axis`; straight-through gradient."""
    others = [other for other in range(weight.ndim) if other != axis]
    step = (weight.detach().abs().amax(dim=others, keepdim=True) / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return round_ste(weight / step) * step


def find_operation(layer: nn.Module) -> Operation | None:
    """Return the function of input and weight that a layer computes; None for a layer that is not quantized."""
    if isinstance(layer, Conv1D):
        return lambda x, w: x @ w + layer.bias
    if type(layer) is nn.Linear:
        return lambda x, w: linear(x, w, layer.bias)
    if type(layer) in (nn.Conv1d, nn.Conv2d) and layer.padding_mode == "zeros":
        convolve: Any = conv1d if isinstance(layer, nn.Conv1d) else conv2d
        return lambda x, w: convolve(x, w, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    return None


def attach_fake_quantization(layer: nn.Module, operation: Operation, learned: LearnedRange) -> Callable[[], None]:
    """Make a layer fake-quantize its input and its weight; returns a function that undoes it. operation: the layer's,
    by `find_operation`."""
    axis = 1 if isinstance(layer, Conv1D) else 0

    def forward(values: Tensor) -> Tensor:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return operation(learned(values), fake_quantize_weight(weight, axis))

    return replace_forward(layer, forward)
