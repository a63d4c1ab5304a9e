"""Sparsity patterns: which weights of a layer become zero, by their scores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import floor

import torch
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2
SPAN = 128
"""Inputs whose mask is chosen together while later weights compensate for earlier ones (the mask block of
SparseGPT)."""


class SparsityPattern(ABC):
    """Chooses the zeros of one layer. span: adjacent inputs whose mask can be chosen without the others."""

    span: int = SPAN

    @abstractmethod
    def select_zeros(self, scores: Tensor, start: int = 0) -> Tensor:
        """Return the zeros among the inputs from `start` on, bool [out, width]. scores: of these inputs, [out,
        width]."""


@dataclass(frozen=True)
class FixedMask(SparsityPattern):
    """A mask that was chosen before, bool [out, in], True for zeros."""

    mask: Tensor

    def select_zeros(self, scores: Tensor, start: int = 0) -> Tensor:
        return self.mask[:, start : start + scores.shape[1]]


@dataclass(frozen=True)
class EvenSparsity(SparsityPattern):
    """`count` zeros in a layer with `width` inputs, spread evenly over spans of inputs.

    rows: spread evenly over outputs too. A higher count never means fewer zeros in a span or an output.
    """

    count: int
    width: int
    rows: bool

    def select_zeros(self, scores: Tensor, start: int = 0) -> Tensor:
        outputs, width = scores.shape
        share, over = divmod(self.count, self.width)
        count = share * width + int(spread_evenly(over, self.width)[start : start + width].sum())
        if not self.rows:
            return select_lowest([scores], count)[0]
        share, over = divmod(count, outputs)
        counts = (share + spread_evenly(over, outputs).long()).to(scores.device)
        return scores.argsort(dim=1, stable=True).argsort(dim=1) < counts[:, None]


@dataclass(frozen=True)
class TwoOfFour(SparsityPattern):
    """2:4 sparsity: two of every four adjacent inputs (Mishra et al., Accelerating Sparse Deep Neural Networks,
    2021)."""

    span = 4

    def select_zeros(self, scores: Tensor, start: int = 0) -> Tensor:
        groups = scores.reshape(len(scores), -1, 4)
        return (groups.argsort(dim=2, stable=True).argsort(dim=2) < 2).flatten(1)


def select_lowest(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return masks of the `count` lowest of all scores, bool, one for each tensor; among equal scores the first
    ones."""
    if count == 0:
        return [torch.zeros_like(part, dtype=torch.bool) for part in scores]
    edge = torch.cat([part.flatten() for part in scores]).kthvalue(count).values
    left = count - sum(int((part < edge).sum()) for part in scores)
    masks = []
    for part in scores:
        equal = part == edge
        first = equal & (equal.flatten().cumsum(0).view_as(part) <= left)
        left -= int(first.sum())
        masks.append((part < edge) | first)
    return masks


def spread_evenly(count: int, size: int) -> Tensor:
    """Return a mask of `count` of `size` places, bool [size], spread evenly by the golden ratio; nested for rising
    counts."""
    return (torch.arange(size, dtype=torch.float64) * GOLDEN % 1).argsort(stable=True).argsort() < count


def split_count(sizes: Sequence[int], share: float) -> list[int]:
    """Return how many of each part add up to the share of all, to the nearest integer."""
    # Halves are rounded up, so that no part of n gives more than n.
    return [b - a for a, b in pairwise(floor(share * size + 0.5) for size in accumulate(sizes, initial=0))]
