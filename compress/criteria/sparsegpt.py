"""What the layer's output would lose without the weight, when the others of its row make up for it as they can."""

from typing import ClassVar

import torch
from torch import Tensor

from compress.criteria.criterion import Criterion, Evidence, Need

DAMPING = 0.01
"""Of the mean of the diagonal, added to it, so that it can be inverted."""


class SparseGpt(Criterion):
    """w^2 / [H^-1]_jj, with H = sum of x xT (the optimal brain surgeon of Hassibi & Stork, 1993, as Frantar & Alistarh,
    SparseGPT, 2023, take it layer by layer)."""

    needs: ClassVar[frozenset[Need]] = frozenset({"moments"})

    def scores(self, evidence: Evidence) -> Tensor:
        assert evidence.moments is not None
        return evidence.weight.float().square() / inverse(evidence.moments.gram).diagonal().float()


def inverse(gram: Tensor) -> Tensor:
    """The inverse of damped second moments, [in, in] float64.

    An input that is always zero gets the damping alone, so that its weights are the first to go.
    """
    mean = float(gram.diagonal().mean())
    damped = gram.double() + torch.eye(len(gram), dtype=torch.float64, device=gram.device) * max(DAMPING * mean, 1e-12)
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))
