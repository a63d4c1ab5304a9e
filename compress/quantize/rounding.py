"""Round weights to integers: which way each goes decides how far the layer's answers move."""

from typing import Literal

import numpy as np

from compress.quantize.adaround import adaround
from compress.quantize.gptq_rounding import gptq
from laconic.tensor import Array

Rounding = Literal["nearest", "adaround", "gptq"]

Levels = tuple[int, int]
"""The lowest and the highest integer of a grid."""


def rounded(
    weight: Array, steps: Array, gram: Array, levels: Levels, rounding: Rounding = "nearest", *, order: bool = True
) -> Array:
    """Integers [in, out] int8 on the grid of these steps; no output is farther off than by rounding to the nearest.

    weight, steps: [in, out] float32. gram: the mean of x xT over what the layer reads, [in, in] float64. order: of
    GPTQ, whether it takes the inputs that matter most first.
    """
    nearest = np.clip(np.rint(weight / steps), *levels)
    if rounding == "nearest":
        return nearest.astype(np.int8)
    if rounding == "gptq":
        found = gptq(weight, steps, gram, levels, order=order)
    else:
        found = adaround(weight, steps, gram, levels)
    better = errors(weight, found * steps, gram) <= errors(weight, nearest * steps, gram)
    return np.where(better, found, nearest).astype(np.int8)


def errors(weight: Array, changed: Array, gram: Array) -> Array:
    """The mean squared error of each output, [out]: the diagonal of dWT G dW."""
    difference = np.asarray(changed, np.float64) - weight
    return np.asarray((difference * (gram @ difference)).sum(axis=0))
