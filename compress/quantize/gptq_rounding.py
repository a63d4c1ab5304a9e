"""GPTQ: round a weight input by input; the inputs that follow compensate for each error.

Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (2022). The scales are
fixed beforehand, from the weight as it was, so that inputs can be taken in any order and groups stay where they are.
"""

import numpy as np
import torch
from torch import Tensor

from compress.statistics.optimal_brain_compression import compress_columns
from laconic.arrays import Array


def gptq(weight: Array, steps: Array, gram: Array, levels: tuple[int, int], *, order: bool = True) -> Array:
    """Integers [in, out] float32. A weight that is zero stays zero: pruning made it so.

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
