"""Rounding methods for weights: nearest, AdaRound and GPTQ; and scales with which sums of products cannot saturate."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from compress.statistics.optimal_brain_compression import compress_columns
from laconic.arrays import Array
from laconic.quantization.qparams import INT8_MAX

Rounding = Literal["nearest", "adaround", "gptq"]

IntegerRange = tuple[int, int]
"""Lowest and highest integer."""

ITERATIONS = 250
"""Of Adam. For MiniLM's layers in 4 bits this halves the error of rounding to nearest; twice as many iterations remove
at most another thirtieth. The penalty is far larger than the paper's and the iterations far fewer, as each gradient is
over all samples, and not over a few."""
WARMUP_SHARE = 0.2
"""Share of the iterations without the penalty."""
LEARNING_RATE = 0.1
PENALTY = 2.0
EXPONENTS = (20.0, 2.0)
"""The penalty's exponent at its first and its last iteration."""
STRETCH_LOW, STRETCH_HIGH = -0.1, 1.1
"""The range of the stretched sigmoid, before it is clipped to 0 and 1."""
ADAM_BETAS = (0.9, 0.999)
"""Decay rates of Adam (Kingma and Ba, 2015)."""


def round_weight(
    weight: Array,
    scales: Array,
    gram: Array,
    levels: IntegerRange,
    rounding: Rounding = "nearest",
    *,
    shifts: Array | float = 0.0,
    act_order: bool = True,
) -> Array:
    """Round a weight to integers; no output has a larger error than with rounding to nearest.

    weight, scales: [in, out] float32. gram: the mean of x xT over the layer's inputs x, [in, in] float64. levels:
    lowest and highest integer. shifts: what the integers stand for more than the weight, [in, out], where groups have
    zeros. act_order: of GPTQ, round the inputs with the largest activations first. A weight that is zero, as pruning
    made it, is rounded to nearest, which keeps it. Returns [in, out] int8.
    """
    kept, weight = weight == 0, weight + shifts
    nearest = np.clip(np.rint(weight / scales), *levels)
    if rounding == "nearest":
        return nearest.astype(np.int8)
    if rounding == "gptq":
        rounded = gptq(weight, scales, gram, levels, kept=kept, order=act_order)
    else:
        rounded = np.where(kept, nearest, adaround(weight, scales, gram, levels))
    better = compare_errors(weight, rounded * scales, nearest * scales, gram) <= 0
    return np.where(better, rounded, nearest).astype(np.int8)


def compare_errors(weight: Array, changed: Array, other: Array, gram: Array) -> Array:
    """Return by how much an output's mean squared error is larger with one changed weight than with another, [out].

    dWT G dW - eWT G eW = (dW - eW)T G (dW + eW), since G is symmetric: one product in place of two.
    """
    difference, total = np.asarray(changed, np.float64) - other, np.asarray(changed, np.float64) + other
    total -= 2 * np.asarray(weight, np.float64)
    return np.asarray((difference * (gram @ total)).sum(axis=0))


def gptq(
    weight: Array, steps: Array, gram: Array, levels: tuple[int, int], *, kept: Array | None = None, order: bool = True
) -> Array:
    """GPTQ: round a weight input by input; the inputs that follow compensate for each error (Frantar et al., GPTQ:
    Accurate Post-Training Quantization for Generative Pre-trained Transformers, 2022). Returns integers [in, out]
    float32.

    The scales are fixed beforehand, from the weight as it was, so that inputs can be taken in any order and groups stay
    where they are.

    weight, steps: [in, out] float32. gram: the mean of x xT, [in, in]. kept: the weights that are rounded to nearest,
    [in, out] bool. order: take the inputs with the largest second moment first (GPTQ's `act_order`).
    """
    inputs = np.argsort(-np.diagonal(gram), kind="stable") if order else np.arange(len(weight))
    grid, exact = (torch.from_numpy(values[inputs].astype(np.float32)) for values in (steps, weight / steps))
    fixed = torch.from_numpy(np.zeros(weight.shape, bool) if kept is None else kept[inputs])
    integers = torch.empty(weight.shape)

    def round_column(left: Tensor, column: int, scale: Tensor) -> Tensor:
        places = torch.where(fixed[column], exact[column], left[:, column] / grid[column])
        integers[column] = places.round().clamp(*levels)
        return integers[column] * grid[column]

    moments = torch.from_numpy(gram[np.ix_(inputs, inputs)])
    compress_columns(torch.from_numpy(weight[inputs].astype(np.float32)).T, moments, round_column)
    result = np.empty(weight.shape, np.float32)
    result[inputs] = integers.numpy()
    return result


def adaround(weight: Array, scales: Array, gram: Array, levels: tuple[int, int]) -> Array:
    """Round by AdaRound: learn for each weight whether it is rounded up or down.

    Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization (2020): a rectified sigmoid of a free
    variable interpolates between the two integers, and a penalty drives it to one of them. For a linear layer the
    squared error of the output is tr(dWT G dW), with G the mean of x xT, so that one product gives the gradient over
    all samples.

    weight, scales: [in, out] float32. gram: the mean of x xT, [in, in]. levels: lowest and highest integer. Returns
    integers [in, out].
    """
    exact = (weight / scales).astype(np.float32)
    floor = np.clip(np.floor(exact), *levels)
    importance = (gram / max(float(np.diagonal(gram).mean()), 1e-30)).astype(np.float32)
    size = scales / np.sqrt((scales**2).mean(axis=0))  # within a column, each group has a scale of its own
    rest = np.clip(exact - floor, 0.001, 0.999)
    free = logit((rest - STRETCH_LOW) / (STRETCH_HIGH - STRETCH_LOW))
    first, second = np.zeros_like(free), np.zeros_like(free)
    for step in range(ITERATIONS):
        sigmoid = 1 / (1 + np.exp(-free))
        wide = sigmoid * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW
        share = np.clip(wide, 0, 1)
        gradient = 2 * size * (importance @ (size * (floor + share - exact)))
        done = (step / ITERATIONS - WARMUP_SHARE) / (1 - WARMUP_SHARE)
        if done >= 0:
            exponent = EXPONENTS[1] + (EXPONENTS[0] - EXPONENTS[1]) * (1 - done)
            distance = 2 * share - 1
            gradient -= PENALTY * 2 * exponent * np.sign(distance) * np.abs(distance) ** (exponent - 1)
        gradient *= np.where((wide > 0) & (wide < 1), sigmoid * (1 - sigmoid) * (STRETCH_HIGH - STRETCH_LOW), 0)
        first = ADAM_BETAS[0] * first + (1 - ADAM_BETAS[0]) * gradient
        second = ADAM_BETAS[1] * second + (1 - ADAM_BETAS[1]) * gradient**2
        scale = first / (1 - ADAM_BETAS[0] ** (step + 1))
        free -= LEARNING_RATE * scale / (np.sqrt(second / (1 - ADAM_BETAS[1] ** (step + 1))) + 1e-8)
    up = 1 / (1 + np.exp(-free)) * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW >= 0.5
    return np.asarray(np.clip(floor + up, *levels))


def logit(share: Array) -> Array:
    """Return the inverse of the sigmoid."""
    return np.asarray(np.log(share / (1 - share)))


def reduced_range_scales(weight: Array, channels: int) -> Array:
    """Return scales of a weight [in, out] in 8 bits, [1, out] float32, with which no sum of two products saturates.

    Without VNNI, x86 multiplies unsigned activations by signed weights and adds each two products in 16 bits
    (`vpmaddubsw`). That fits if two such weights add up to at most 128: 255 * 128 < 2^15. Only pairs count, so a weight
    whose neighbour is small or of the other sign keeps the whole range of 8 bits, which a range of 7 bits for all would
    not give. Rounding by `gptq` or `adaround` may exceed 128 by the little that it differs from rounding to nearest.

    channels: the input channels of one group; the rows are those of the first channel for each position of the kernel,
    then those of the second.
    """
    largest = np.abs(weight).max(axis=0)
    positions = weight.reshape(channels, -1, weight.shape[1]).swapaxes(0, 1)
    if channels > 1:
        largest = np.maximum(largest, _largest_pair(positions))
    if channels % 2 and weight.shape != (len(weight), channels):  # that is depthwise, whose kernels add no pairs
        largest = np.maximum(largest, _largest_pair(positions.reshape(1, *weight.shape)))
    scales = np.maximum(largest / INT8_MAX, np.finfo(np.float32).tiny)
    return np.asarray(scales[None], np.float32)


def _largest_pair(rows: Array) -> Array:
    """Return the largest absolute sum of rows 2k and 2k + 1 of each output: [positions, in, out] to [out].

    Kernels of OpenVINO add channels of one position, and pad them if their number is odd; those of ONNX Runtime go on
    with the next position then. (Seen with ONNX Runtime 1.31 and OpenVINO 2026.4, by weights of which two are not 0.)
    """
    even = rows.shape[1] // 2 * 2
    sums = rows[:, 0:even:2] + rows[:, 1:even:2]
    return np.asarray(np.abs(sums).max(axis=(0, 1), initial=0))
