"""Quantization parameters: scales and zero points of weights and activations in 8 and 4 bits, and fake quantization."""

from typing import Literal

import numpy as np

from laconic.arrays import Array
from laconic.quantization.plan import Range

INT8_MAX = 127
"""Signed INT8 is symmetric: -128 is not used, so that a number and its negative are equally exact."""
FLOAT8_MAX = 448.0
"""The largest number of FP8 E4M3."""
INT4_RANGE = (-8, 7)
INT8_LEVELS = (-INT8_MAX, INT8_MAX)
DEFAULT_GROUP_SIZE = 32
"""Inputs that share a scale in 4 bits, by default."""
INT4_SCALE_SHARES = np.linspace(1.0, 0.7, 13)
"""Shares of the scale that represents the largest weight, which are tried in 4 bits."""
NORMAL = 2.0**-14
"""The least number that FP16 represents with all of its digits."""

Levels = tuple[int, int]
"""The lowest and the highest integer."""


def quantize_weight(weight: Array, axis: int) -> tuple[Array, Array]:
    """Quantize a weight to int8 with one scale per slice along `axis`; returns it and the scales [axis] float32."""
    quantized, scale = quantize_along(weight, tuple(other for other in range(weight.ndim) if other != axis))
    return quantized, scale.reshape(-1)


def quantize_along(weight: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Quantize a weight to int8 with one scale for all numbers along `axes`; returns it and the scales, float32, in
    which these axes have size 1."""
    largest = np.abs(weight).max(axis=axes, keepdims=True)
    scale = np.maximum(largest / INT8_MAX, np.finfo(np.float32).tiny).astype(np.float32)
    return np.clip(np.rint(weight / scale), -INT8_MAX, INT8_MAX).astype(np.int8), scale


def fake_quantize_weight(weight: Array, axis: int) -> Array:
    """Quantize a weight as `quantize_weight` does, and dequantize it."""
    quantized, scale = quantize_weight(weight, axis)
    shape = [1] * weight.ndim
    shape[axis] = -1
    return np.asarray(quantized * scale.reshape(shape))


def effective_group_size(group_size: int | None, rows: int) -> int:
    """Return the number of inputs that share a scale: a group, or all `rows` of them where group_size is None."""
    return min(group_size or rows, rows)


def expand_scales(scales: Array, rows: int, group_size: int | None) -> Array:
    """Repeat group-wise scales [..., groups, out] for each of `rows` inputs: [..., rows, out]."""
    return np.asarray(np.repeat(scales, effective_group_size(group_size, rows), axis=-2)[..., :rows, :])


ON_GRID = 0.05
"""Weights that are so many steps from a grid, as their root mean square, lie on it; others are 0.29 steps from one.
BF16 rounds a weight on a grid by 0.02 steps."""


def fit_grid(
    weight: Array, group_size: int | None, levels: Levels = INT4_RANGE, symmetric: bool = True, *, clips: bool = True
) -> tuple[Array, Array | None]:
    """Find the scales, and the zeros unless it is symmetric, of a weight [in, out] that is quantized in groups:
    [groups, out] float32 each. A number is (integer - zero) times scale.

    A smaller scale clips the largest weights and represents the others better, so in 4 bits the one of several shares
    of the full scale is taken that has the least squared error; the full one if not `clips`. Scales are numbers of FP16
    where these have all digits, to be stored as such. Zeros are levels, so that 0 is represented, unless the weight
    lies on a grid with others (`find_grid`): engines multiply faster with these.
    """
    parts = divide_inputs(weight, group_size)
    if not symmetric and (grid := find_grid(parts, levels)) is not None:
        return grid
    low, high = parts.min(axis=1).clip(max=0), parts.max(axis=1).clip(min=0)
    whole = np.maximum(-low, high) / levels[1] if symmetric else (high - low) / (levels[1] - levels[0])
    whole = np.maximum(whole, np.finfo(np.float32).tiny).astype(np.float32)
    best, zeros, least = whole, np.zeros_like(whole), np.full(whole.shape, np.inf)
    for share in INT4_SCALE_SHARES if clips and levels == INT4_RANGE else (1.0,):
        scale = round_to_half(whole * np.float32(share))
        # The middle between the two limits is that of the levels.
        zero = np.zeros_like(scale) if symmetric else sum(levels) / 2 - (high + low) / (2 * scale)
        zero = np.rint(zero).clip(*levels)
        integers = np.clip(np.rint(parts / scale[:, None] + zero[:, None]), *levels)
        error = (((integers - zero[:, None]) * scale[:, None] - parts) ** 2).sum(axis=1)
        best, zeros = np.where(error < least, scale, best), np.where(error < least, zero, zeros)
        least = np.minimum(error, least)
    return np.asarray(best, np.float32), None if symmetric else np.asarray(zeros, np.float32)


def find_grid(parts: Array, levels: Levels) -> tuple[Array, Array] | None:
    """Find the scales and the zeros of the grid that groups of weights [groups, size, out] lie on, as those of a
    checkpoint that was quantized before (GGUF's Q4_1); None where they lie on none. Its zeros may be any numbers."""
    low, high = parts.min(axis=1), parts.max(axis=1)
    whole = np.where(high > low, (high - low) / (levels[1] - levels[0]), np.maximum(np.abs(low), 1e-30))
    scale = round_to_half(np.maximum(whole, np.finfo(np.float32).tiny).astype(np.float32))
    zero = np.where(high > low, sum(levels) / 2 - (high + low) / (2 * scale), -low / scale).astype(np.float32)
    places = parts / scale[:, None] + zero[:, None]
    error = np.rint(places).clip(*levels) - places
    return (scale, zero) if float(np.square(error).mean()) <= ON_GRID**2 else None


def find_grid_size(weight: Array, group_size: int | None) -> int | None:
    """Return the inputs that share a scale: `group_size`, or fewer where a weight [in, out] lies on a grid in 4 bits
    with smaller groups, which larger ones would not keep."""
    if group_size is None or group_size <= DEFAULT_GROUP_SIZE:
        return group_size
    return DEFAULT_GROUP_SIZE if is_on_grid(weight, DEFAULT_GROUP_SIZE) else group_size


def is_on_grid(weight: Array, group_size: int | None) -> bool:
    """Return whether a weight [in, out] lies on a grid in 4 bits with zeros, in groups of this size or smaller ones."""
    return find_grid(divide_inputs(weight, find_grid_size(weight, group_size)), INT4_RANGE) is not None


def divide_inputs(weight: Array, group_size: int | None) -> Array:
    """Divide a weight [in, out] into groups of inputs: [groups, size, out] float32. The last group is filled up with
    its last input."""
    step = effective_group_size(group_size, len(weight))
    padded = np.pad(weight.astype(np.float32), ((0, -len(weight) % step), (0, 0)), mode="edge")
    return padded.reshape(-1, step, weight.shape[1])


def round_to_half(scales: Array) -> Array:
    """Round scales to numbers of FP16, but for those that it would represent with fewer digits or not at all."""
    exact = (scales >= NORMAL) & (scales <= np.finfo(np.float16).max)
    return np.asarray(np.where(exact, scales.clip(max=np.finfo(np.float16).max).astype(np.float16), scales), np.float32)


def quantize_in_groups(
    weight: Array, group_size: int | None, levels: Levels = INT4_RANGE, symmetric: bool = True
) -> tuple[Array, Array, Array | None]:
    """Quantize a weight [in, out]; return int8 within the levels, the scales, and the zeros, as by `fit_grid`."""
    scales, zeros = fit_grid(weight, group_size, levels, symmetric)
    steps = expand_scales(scales, len(weight), group_size)
    shifts = 0 if zeros is None else expand_scales(zeros, len(weight), group_size)
    return np.clip(np.rint(weight / steps + shifts), *levels).astype(np.int8), scales, zeros


ActivationType = Literal["uint8", "int8", "float8"]
"""The type of a quantized activation: uint8 has a zero point; int8 and float8 (E4M3) are symmetric around 0."""


def activation_qparams(limits: Range, dtype: ActivationType = "uint8") -> tuple[float, int]:
    """Return scale and zero point for a range.

    Zero is always represented exactly: padding is zero, and must stay so.
    """
    low, high = min(limits.low, 0.0), max(limits.high, 0.0)
    if dtype != "uint8":
        return max(-low, high, 1e-30) / (INT8_MAX if dtype == "int8" else FLOAT8_MAX), 0
    scale = max(high - low, 1e-30) / 255
    return scale, int(np.clip(np.rint(-low / scale), 0, 255))


def fake_quantize_activation(values: Array, limits: Range) -> Array:
    """Quantize values to uint8 over a range, and dequantize them."""
    scale, zero = activation_qparams(limits)
    return np.asarray((np.clip(np.rint(values / scale) + zero, 0, 255) - zero) * scale)
