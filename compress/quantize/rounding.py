"""Rounding methods for weights: nearest, AdaRound and GPTQ."""

from typing import Literal

import numpy as np

from compress.quantize.adaround import adaround
from compress.quantize.gptq_rounding import gptq
from laconic.arrays import Array

Rounding = Literal["nearest", "adaround", "gptq"]

IntegerRange = tuple[int, int]
"""Lowest and highest integer."""


def round_weight(
    weight: Array,
    scales: Array,
    gram: Array,
    levels: IntegerRange,
    rounding: Rounding = "nearest",
    *,
    act_order: bool = True,
) -> Array:
    """Round a weight to integers; no output has a larger error than with rounding to nearest.

    weight, scales: [in, out] float32. gram: the mean of x xT over the layer's inputs x, [in, in] float64. levels:
    lowest and highest integer. act_order: of GPTQ, round the inputs with the largest activations first. Returns
    [in, out] int8.
    """
    nearest = np.clip(np.rint(weight / scales), *levels)
    if rounding == "nearest":
        return nearest.astype(np.int8)
    if rounding == "gptq":
        found = gptq(weight, scales, gram, levels, order=act_order)
    else:
        found = adaround(weight, scales, gram, levels)
    better = output_errors(weight, found * scales, gram) <= output_errors(weight, nearest * scales, gram)
    return np.where(better, found, nearest).astype(np.int8)


def output_errors(weight: Array, changed: Array, gram: Array) -> Array:
    """The mean squared error of each output, [out]: the diagonal of dWT G dW. gram: G, [in, in]."""
    difference = np.asarray(changed, np.float64) - weight
    return np.asarray((difference * (gram @ difference)).sum(axis=0))
