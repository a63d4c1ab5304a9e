"""The 8-bit grids: which numbers are represented, and what becomes of a number that is not."""

import numpy as np

from laconic.plan import Range
from laconic.tensor import Array

LARGEST = 127
"""Signed grids are symmetric: -128 is left out, so that a number and its negative are equally exact."""


def quantize_weight(weight: Array, axis: int) -> tuple[Array, Array]:
    """One scale per slice along `axis`: the weight as int8, and the scales [size of axis] float32."""
    others = tuple(other for other in range(weight.ndim) if other != axis)
    scale = np.maximum(np.abs(weight).max(axis=others) / LARGEST, np.finfo(np.float32).tiny).astype(np.float32)
    shape = [1] * weight.ndim
    shape[axis] = -1
    quantized = np.clip(np.rint(weight / scale.reshape(shape)), -LARGEST, LARGEST).astype(np.int8)
    return quantized, scale


def rounded_weight(weight: Array, axis: int) -> Array:
    """The weight as `quantize_weight` gives it back."""
    quantized, scale = quantize_weight(weight, axis)
    shape = [1] * weight.ndim
    shape[axis] = -1
    return np.asarray(quantized * scale.reshape(shape))


def activation_grid(limits: Range, *, symmetric: bool = False) -> tuple[float, int]:
    """Scale and zero point of the grid over a range: int8 around 0 if symmetric, else uint8.

    Zero is always on the grid: padding is zero, and must stay so.
    """
    low, high = min(limits.low, 0.0), max(limits.high, 0.0)
    if symmetric:
        return max(-low, high, 1e-30) / LARGEST, 0
    scale = max(high - low, 1e-30) / 255
    return scale, int(np.clip(np.rint(-low / scale), 0, 255))


def rounded_activation(values: Array, limits: Range) -> Array:
    """Values as the unsigned grid over a range gives them back."""
    scale, zero = activation_grid(limits)
    return np.asarray((np.clip(np.rint(values / scale) + zero, 0, 255) - zero) * scale)
