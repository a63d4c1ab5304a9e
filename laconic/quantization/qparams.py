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
DEFAULT_GROUP_SIZE = 32
"""Inputs that share a scale in 4 bits, by default."""
INT4_SCALE_SHARES = np.linspace(1.0, 0.7, 13)
"""Shares of the scale that represents the largest weight, which are tried in 4 bits."""


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


def int4_scales(weight: Array, group_size: int | None) -> Array:
    """Find group-wise scales of a weight [in, out] in 4 bits with the least squared error: [groups, out] float32.

    A smaller scale clips the largest weights and represents the others better, so several shares of the full scale are
    tried.
    """
    rows, width = weight.shape
    step = effective_group_size(group_size, rows)
    padded = np.zeros((-(-rows // step) * step, width), np.float32)
    padded[:rows] = weight
    parts = padded.reshape(-1, step, width)
    whole = np.maximum(np.abs(parts).max(axis=1) / INT4_RANGE[1], np.finfo(np.float32).tiny).astype(np.float32)
    best, least = whole, np.full(whole.shape, np.inf)
    for share in INT4_SCALE_SHARES:
        scale = whole * np.float32(share)
        error = ((np.clip(np.rint(parts / scale[:, None]), *INT4_RANGE) * scale[:, None] - parts) ** 2).sum(axis=1)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return np.asarray(best, np.float32)


def quantize_int4(weight: Array, group_size: int | None) -> tuple[Array, Array]:
    """Quantize a weight [in, out] to 4 bits; returns int8 within INT4_RANGE, and the scales [groups, out] float32."""
    scales = int4_scales(weight, group_size)
    steps = expand_scales(scales, len(weight), group_size)
    return np.clip(np.rint(weight / steps), *INT4_RANGE).astype(np.int8), scales


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
