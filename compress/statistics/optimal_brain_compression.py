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
"""Columns that are brought up to date at once, by the changes of all before (the lazy batch updates of GPTQ)."""

Decide = Callable[[Tensor, int, Tensor], Tensor]
"""Called with the compensated weight [out, in] (up to date from `column` to the end of its block), the column, and the
scale of each column's error, [in]: w^2 / scale^2 is what compressing w to 0 adds to the squared error of the output.
Returns the column's final values, [out]."""


def damp(gram: Tensor) -> Tensor:
    """Return a copy of a Gram matrix that can be inverted, [in, in] float64.

    An input that is always zero gets the damping alone, so that its weights have the lowest saliency.
    """
    damped = gram.to(torch.float64, copy=True)  # one copy: of 14,336 inputs, each has 1.6 GB
    damped.diagonal().add_(max(DAMPING * float(gram.diagonal().mean()), 1e-12))
    return damped


def invert_damped(gram: Tensor) -> Tensor:
    """Return the inverse of a damped Gram matrix, [in, in] float64."""
    return torch.cholesky_inverse(torch.linalg.cholesky(damp(gram)))


def factorize_damped(gram: Tensor) -> Tensor:
    """Return the lower triangular M whose MT M is the damped Gram matrix, [in, in] float32.

    Row i of M d is what the change d of an input's weight adds to the outputs, beyond what later inputs compensate. It
    takes a quarter of the time of the inverse and its Cholesky factor, from which GPTQ has the same numbers (Chen et
    al., The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm, 2025).
    """
    factor: Tensor = torch.linalg.cholesky(damp(gram.flip(0, 1)), upper=True)
    return factor.float().flip(0, 1)


def compress_columns(weight: Tensor, gram: Tensor, decide: Decide) -> Tensor:
    """Return the compressed weight, [out, in] float32, columns decided in order and each error compensated by later
    ones.

    weight: [out, in]. gram: the sum or mean of x xT over the layer's inputs, [in, in].
    """
    factor = factorize_damped(gram)
    scale = 1 / factor.diagonal()
    rows = weight.T.float().clone(memory_format=torch.contiguous_format)  # a column of the weight is a row in memory
    changes = torch.empty_like(rows)
    identity = torch.eye(BLOCK)
    for start in range(0, len(rows), BLOCK):
        stop = min(start + BLOCK, len(rows))
        block = factor[start:stop, start:stop]
        inverse = torch.linalg.solve_triangular(block, identity[: stop - start, : stop - start], upper=False)
        changes[start:stop] = rows[start:stop]
        rows[start:stop] -= inverse @ (factor[start:stop, :start] @ changes[:start])
        for column in range(start, stop):
            value = decide(rows.T, column, scale)
            error = (rows[column] - value) / scale[column]
            rows[column:stop].addr_(inverse[column - start :, column - start], error, alpha=-1)
            rows[column] = value
        changes[start:stop] = rows[start:stop] - changes[start:stop]
    return rows.T
