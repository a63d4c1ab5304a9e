"""Take weights out of a layer, and let those that are still to come make up for each.

Frantar & Alistarh, SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot (2023).
"""

import torch
from torch import Tensor

from compress.criteria.sparsegpt import inverse
from compress.prune.pattern import Pattern

BLOCK = 128
"""Inputs after which the rest of the weight is brought up to date."""


def compensated(weight: Tensor, gram: Tensor, pattern: Pattern) -> Tensor:
    """The weight [out, in] with zeros where the pattern puts them, which the error of the output decides about.

    gram: the sum of x xT, [in, in]. What is zero already stays so. The scores that the pattern is given are those of
    SparseGPT, of the weights as they are by then.
    """
    # The upper factor of the inverse: its row i holds what is left of the inverse when the inputs before i are settled.
    factor = torch.linalg.cholesky(inverse(gram), upper=True).float()
    left, before = weight.float().clone(), weight == 0
    for start in range(0, weight.shape[1], BLOCK):
        stop = min(start + BLOCK, weight.shape[1])
        faults = torch.empty_like(left[:, start:stop])
        for column in range(start, stop):
            if (column - start) % pattern.span == 0:
                end = min(column + pattern.span, stop)
                scores = left[:, column:end].square() / factor.diagonal()[column:end].square()
                known = before[:, column:end]
                zeros = pattern.zeros(scores.masked_fill(known, -1.0), column) | known
                first = column
            kept = left[:, column].masked_fill(zeros[:, column - first], 0.0)
            fault = (left[:, column] - kept) / factor[column, column]
            left[:, column:stop] -= torch.outer(fault, factor[column, column:stop])
            left[:, column] = kept
            faults[:, column - start] = fault
        left[:, stop:] -= faults @ factor[start:stop, stop:]
    return left.to(weight.dtype)
