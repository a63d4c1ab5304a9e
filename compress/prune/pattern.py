"""Which weights of a layer become zero, by their scores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import floor

import torch
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2
SPAN = 128
"""Inputs that are decided about together, where later weights make up for what earlier ones have lost (SparseGPT's)."""


class Pattern(ABC):
    """What has to be zero in one layer. span: inputs that may be decided about without the others."""

    span: int = SPAN

    @abstractmethod
    def zeros(self, scores: Tensor, start: int = 0) -> Tensor:
        """Where zeros go, bool [out, width], among the inputs from `start` on. scores: of those, [out, width]."""


@dataclass(frozen=True)
class Fixed(Pattern):
    """What was decided before, bool [out, in]."""

    chosen: Tensor

    def zeros(self, scores: Tensor, start: int = 0) -> Tensor:
        return self.chosen[:, start : start + scores.shape[1]]


@dataclass(frozen=True)
class Share(Pattern):
    """So many weights of a layer with `width` inputs, each stretch of inputs giving its share.

    rows: each output gives its share too. More weights are never fewer of a stretch, or of an output.
    """

    count: int
    width: int
    rows: bool

    def zeros(self, scores: Tensor, start: int = 0) -> Tensor:
        outputs, width = scores.shape
        each, over = divmod(self.count, self.width)
        count = each * width + int(first(over, self.width)[start : start + width].sum())
        if not self.rows:
            return lowest([scores], count)[0]
        each, over = divmod(count, outputs)
        counts = (each + first(over, outputs).long()).to(scores.device)
        return scores.argsort(dim=1, stable=True).argsort(dim=1) < counts[:, None]


@dataclass(frozen=True)
class TwoOfFour(Pattern):
    """Two of every four inputs that lie next to each other."""

    span = 4

    def zeros(self, scores: Tensor, start: int = 0) -> Tensor:
        groups = scores.reshape(len(scores), -1, 4)
        return (groups.argsort(dim=2, stable=True).argsort(dim=2) < 2).flatten(1)


def lowest(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Where the `count` lowest of all scores are, bool, a tensor for each; among equals the first ones."""
    if count == 0:
        return [torch.zeros_like(each, dtype=torch.bool) for each in scores]
    edge = torch.cat([each.flatten() for each in scores]).kthvalue(count).values
    left = count - sum(int((each < edge).sum()) for each in scores)
    found = []
    for each in scores:
        equal = each == edge
        first = equal & (equal.flatten().cumsum(0).view_as(each) <= left)
        left -= int(first.sum())
        found.append((each < edge) | first)
    return found


def first(count: int, size: int) -> Tensor:
    """The first so many of `size` places, bool [size], in an order in which any first few lie evenly among all."""
    return (torch.arange(size, dtype=torch.float64) * GOLDEN % 1).argsort(stable=True).argsort() < count


def spread(sizes: Sequence[int], share: float) -> list[int]:
    """How many of each part, so that together they are the share of all, to the nearest whole number."""
    # Of two whole numbers that are as near the greater, so that no part of n gives more than n.
    return [b - a for a, b in pairwise(floor(share * size + 0.5) for size in accumulate(sizes, initial=0))]
