"""Reduced range: scales of weights with which pairs of 8-bit products, added in 16 bits, cannot saturate."""

import numpy as np

from laconic.arrays import Array
from laconic.quantization.qparams import INT8_MAX


def reduced_range_scales(weight: Array, channels: int) -> Array:
    """Scales of a weight [in, out] in 8 bits, [1, out] float32, with which no sum of two products saturates.

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
    """The largest absolute sum of rows 2k and 2k + 1 of each output: [positions, in, out] to [out].

    Kernels of OpenVINO add channels of one position, and pad them if their number is odd; those of ONNX Runtime go on
    with the next position then. (Seen with ONNX Runtime 1.31 and OpenVINO 2026.4, by weights of which two are not 0.)
    """
    even = rows.shape[1] // 2 * 2
    sums = rows[:, 0:even:2] + rows[:, 1:even:2]
    return np.asarray(np.abs(sums).max(axis=(0, 1), initial=0))
