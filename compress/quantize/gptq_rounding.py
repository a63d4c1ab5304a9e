"""GPTQ: round a weight input by input, and let those that are still to come make up for each error.

Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (2022). The scales are
settled before, from the weight as it was, so that inputs may be taken in any order and groups stay where they are.
"""

import numpy as np

from laconic.tensor import Array

DAMPING = 0.01
"""Of the mean of the diagonal, added to it, so that it can be inverted."""
BLOCK = 128
"""Inputs after which the rest of the weight is brought up to date."""


def gptq(weight: Array, steps: Array, gram: Array, levels: tuple[int, int], *, order: bool = True) -> Array:
    """Integers [in, out]. A weight that is zero stays so: pruning put it there.

    weight, steps: [in, out]. gram: the mean of x xT, [in, in]. order: take the inputs that matter most first.
    """
    diagonal = np.diagonal(gram)
    rows = np.argsort(-diagonal, kind="stable") if order else np.arange(len(weight))
    hessian = gram[np.ix_(rows, rows)] + np.eye(len(rows)) * max(DAMPING * float(diagonal.mean()), 1e-12)
    # The upper factor of the inverse: its row i holds what is left of the inverse when the inputs before i are settled.
    factor = np.linalg.cholesky(np.linalg.inv(hessian)).T.astype(np.float32)
    remaining, grid, zero = weight[rows].astype(np.float32), steps[rows], weight[rows] == 0
    integers = np.empty(weight.shape, np.float32)
    for start in range(0, len(rows), BLOCK):
        end = min(start + BLOCK, len(rows))
        faults = np.empty((end - start, weight.shape[1]), np.float32)
        for row in range(start, end):
            integers[row] = np.where(zero[row], 0, np.clip(np.rint(remaining[row] / grid[row]), *levels))
            fault = (remaining[row] - integers[row] * grid[row]) / factor[row, row]
            remaining[row + 1 : end] -= np.outer(factor[row, row + 1 : end], fault)
            faults[row - start] = fault
        remaining[end:] -= factor[start:end, end:].T @ faults
    found = np.empty_like(integers)
    found[rows] = integers
    return found
