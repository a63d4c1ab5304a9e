"""Rounding methods for weights: nearest, AdaRound and GPTQ."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from compress.quantize.adaround import adaround
from compress.statistics.optimal_brain_compression import compress_columns
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


def gptq(weight: Array, steps: Array, gram: Array, levels: tuple[int, int], *, order: bool = True) -> Array:
    """GPTQ: round a weight input by input; the inputs that follow compensate for each error (Frantar et al., GPTQ:
    Accurate Post-Training Quantization for Generative Pre-trained Transformers, 2022). Returns integers [in, out]
    float32. A weight that is zero stays zero: pruning made it so.

    The scales are fixed beforehand, from the weight as it was, so that inputs can be taken in any order and groups stay
    where they are.

    weight, steps: [in, out] float32. gram: the mean of x xT, [in, in]. order: take the inputs with the largest second
    moment first (GPTQ's `act_order`).
    """
    inputs = np.argsort(-np.diagonal(gram), kind="stable") if order else np.arange(len(weight))
    grid, zero = torch.from_numpy(steps[inputs].astype(np.float32)), torch.from_numpy(weight[inputs] == 0)
    integers = torch.empty(weight.shape)

    def round_column(left: Tensor, column: int, scale: Tensor) -> Tensor:
        integers[column] = (left[:, column] / grid[column]).round().clamp(*levels).masked_fill(zero[column], 0)
        return integers[column] * grid[column]

    moments = torch.from_numpy(gram[np.ix_(inputs, inputs)])
    compress_columns(torch.from_numpy(weight[inputs].astype(np.float32)).T, moments, round_column)
    found = np.empty(weight.shape, np.float32)
    found[inputs] = integers.numpy()
    return found
