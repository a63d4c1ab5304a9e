"""The grids of 8 and 4 bits: which numbers are represented, and what becomes of a number that is not."""

import numpy as np

from laconic.quantization.plan import Range
from laconic.tensor import Array

LARGEST = 127
"""Signed grids are symmetric: -128 is left out, so that a number and its negative are equally exact."""
FOUR_BITS = (-8, 7)
GROUP = 32
"""Inputs that share a scale in 4 bits, where nobody says how many."""
SHARES = np.linspace(1.0, 0.7, 13)
"""Of the scale that holds the largest weight: those that are tried in 4 bits."""


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


def step_of(group: int | None, rows: int) -> int:
    """Inputs that share a scale: a group of them, or all."""
    return min(group or rows, rows)


def spread(scales: Array, rows: int, group: int | None) -> Array:
    """Scales [..., groups, out], for each of `rows` inputs: [..., rows, out]."""
    return np.asarray(np.repeat(scales, step_of(group, rows), axis=-2)[..., :rows, :])


def group_scales(weight: Array, group: int | None) -> Array:
    """The scales of a weight [in, out] in 4 bits, [groups, out] float32: those with the least squared error.

    One scale for each `group` inputs and each output. A scale that clips the largest weights may serve the others
    better: shares of the one that holds all are tried.
    """
    rows, width = weight.shape
    step = step_of(group, rows)
    padded = np.zeros((-(-rows // step) * step, width), np.float32)
    padded[:rows] = weight
    parts = padded.reshape(-1, step, width)
    whole = np.maximum(np.abs(parts).max(axis=1) / FOUR_BITS[1], np.finfo(np.float32).tiny).astype(np.float32)
    best, least = whole, np.full(whole.shape, np.inf)
    for share in SHARES:
        scale = whole * np.float32(share)
        error = ((np.clip(np.rint(parts / scale[:, None]), *FOUR_BITS) * scale[:, None] - parts) ** 2).sum(axis=1)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return np.asarray(best, np.float32)


def quantize_groups(weight: Array, group: int | None) -> tuple[Array, Array]:
    """A weight [in, out] in 4 bits: int8 within FOUR_BITS, and its scales [groups, out] float32."""
    scales = group_scales(weight, group)
    steps = spread(scales, len(weight), group)
    return np.clip(np.rint(weight / steps), *FOUR_BITS).astype(np.int8), scales


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
