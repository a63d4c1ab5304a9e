"""Weights in 8 bits."""

import numpy as np

from laconic.tensor import Array

LARGEST = 127
"""The grid is symmetric: -128 is left out, so that a weight and its negative are equally exact."""


def quantize_weight(weight: Array, axis: int) -> tuple[Array, Array]:
    """One scale per slice along `axis`: the weight as int8, and the scales [size of axis] float32."""
    others = tuple(other for other in range(weight.ndim) if other != axis)
    scale = np.maximum(np.abs(weight).max(axis=others) / LARGEST, np.finfo(np.float32).tiny).astype(np.float32)
    shape = [1] * weight.ndim
    shape[axis] = -1
    quantized = np.clip(np.rint(weight / scale.reshape(shape)), -LARGEST, LARGEST).astype(np.int8)
    return quantized, scale
