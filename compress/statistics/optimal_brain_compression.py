"""Column-wise compression of a weight matrix with error compensation: the recursion that SparseGPT and GPTQ share.

Inputs are taken in order. The value that a column gets (zero, or a point of a quantization grid) is the caller's
decision; its error is compensated by the columns that follow, in closed form (optimal brain surgeon, Hassibi & Stork,
1993; optimal brain compression, Frantar & Alistarh, 2022; GPTQ, Frantar et al., 2022; SparseGPT, Frantar & Alistarh,
2023).
"""

from collections.abc import Callable

import torch
from torch import Tensor

DAMPING = 0.01
"""Added to the diagonal as a share of its mean, so that the Gram matrix can be inverted."""
BLOCK = 128
"""Columns after which all later columns are updated (the lazy batch updates of GPTQ). Until then only those of the same
block are up to date."""

Decide = Callable[[Tensor, int, Tensor], Tensor]
"""Called with the compensated weight [out, in] (up to date from `column` to the end of its block), the column, and the
scale of each column's error, [in]: w^2 / scale^2 is what compressing w to 0 adds to the squared error of the output.
Returns the column's final values, [out]."""


def invert_damped(gram: Tensor) -> Tensor:
    """Return the inverse of a damped Gram matrix, [in, in] float64.

    An input that is always zero gets the damping alone, so that its weights have the lowest saliency.
    """
    damped = gram.to(torch.float64, copy=True)  # one copy: of 14,336 inputs, each has 1.6 GB
    damped.diagonal().add_(max(DAMPING * float(gram.diagonal().mean()), 1e-12))
    factor = torch.linalg.cholesky(damped)
    del damped
    return torch.cholesky_inverse(factor)


def compress_columns(weight: Tensor, gram: Tensor, decide: Decide) -> Tensor:
    """Return the compressed weight, [out, in] float32, columns decided in order and each error compensated by later
    ones.

    weight: [out, in]. gram: the sum or mean of x xT over the layer's inputs, [in, in].
    """
    # Row i of the upper Cholesky factor holds what is left of the inverse when the inputs before i are eliminated.
    factor = torch.linalg.cholesky(invert_damped(gram), upper=True).float()
    scale = factor.diagonal()
    left = weight.float().clone()
    for start in range(0, weight.shape[1], BLOCK):
        stop = min(start + BLOCK, weight.shape[1])
        errors = torch.empty_like(left[:, start:stop])
        for column in range(start, stop):
            value = decide(left, column, scale)
            error = (left[:, column] - value) / scale[column]
            left[:, column:stop] -= torch.outer(error, factor[column, column:stop])
            left[:, column] = value
            errors[:, column - start] = error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    return left
