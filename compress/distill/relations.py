"""How the teacher's tokens relate to one another in attention, as targets."""

from collections.abc import Sequence
from math import gcd
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import kl_div

from compress.distill.distill_stage import Distil
from compress.distill.distillation_loss import Imitation, Terms
from compress.distill.hooks import Pass
from compress.distill.layer_mapping import Pair
from compress.transformer.anatomy import anatomy
from laconic.errors import SourceError, UsageError
from laconic.recipes.stage import Property
from laconic.tasks.task import Task

WIDTH = 16
"""Features of a relation head at least, where nobody says how many heads there are."""


class Attention(Imitation):
    """The Kullback-Leibler divergence of the student's query-query, key-key and value-value relations from the
    teacher's, at each place, the mean over the heads and the three kinds (MiniLMv2: Wang et al., 2021,
    arXiv:2012.15828). A relation is the softmax of scaled products of all places with all others.

    heads: of relations, into which the features of all attention heads are parted anew, so that a student may have lost
    some of those; by default as many as both widths allow, of 16 features at least. layer: the student's, and the
    teacher's that it stands for; counted from the end where it is negative.
    """

    def __init__(self, heads: int | None = None, layer: int = -1, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.heads, self.layer = heads, layer
        self._parted: list[int] = []

    def choose(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[Pair]) -> None:
        try:
            own, theirs = anatomy(student).family, anatomy(teacher).family
        except SourceError as error:
            raise UsageError(
                f"there is no attention to learn relations from: {str(error).partition('; ')[0]}. Take "
                f"distill.features or distill.logits"
            ) from error
        if not -len(pairs) <= self.layer < len(pairs):
            raise UsageError(f"layer {self.layer} is none of the student's {len(pairs)}. Give one that it has")
        pair = pairs[self.layer]
        self.student = tuple(f"{pair.student}.{path}" for path in (own.query, own.key, own.value))
        self.teacher = tuple(f"{pair.last}.{path}" for path in (theirs.query, theirs.key, theirs.value))

    def fit(self, student: Pass, teacher: Pass) -> None:
        both = zip(kinds(student, self.student), kinds(teacher, self.teacher), strict=True)
        self._parted = [self.parted(found.shape[-1], wanted.shape[-1]) for found, wanted in both]

    def parted(self, own: int, theirs: int) -> int:
        """Into how many heads two widths are parted. Raises UsageError where they cannot be."""
        most = gcd(own, theirs)
        if self.heads is None:
            return max(heads for heads in range(1, most + 1) if most % heads == 0 and most // heads >= min(WIDTH, most))
        if most % self.heads:
            raise UsageError(
                f"heads: {self.heads} relation heads do not part {own} features of the student and {theirs} of the "
                f"teacher evenly. Give a number that divides {most}, or leave heads out"
            )
        return self.heads

    def loss(self, student: Pass, teacher: Pass, terms: Terms) -> Tensor:
        parts = [
            terms.total(divergence(found, wanted, heads, terms.mask))
            for found, wanted, heads in zip(
                kinds(student, self.student), kinds(teacher, self.teacher), self._parted, strict=True
            )
        ]
        return torch.stack(parts).mean()


def kinds(seen: Pass, names: Sequence[str]) -> tuple[Tensor, ...]:
    """Queries, keys and values, [rows, places, features] each; parted where one layer makes all three."""
    if len(set(names)) == 1:
        return torch.chunk(seen.outputs[names[0]], 3, dim=-1)
    return tuple(seen.outputs[name] for name in names)


def divergence(found: Tensor, wanted: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """Of the relations at each place, the mean over the heads: [rows, places] float32. mask: places that count."""
    own, theirs = relations(found, heads, mask), relations(wanted, heads, mask)
    each = kl_div(own, theirs, reduction="none", log_target=True)
    if mask is not None:
        each = each.masked_fill(~mask[:, None, None, :], 0.0)
    return each.sum(dim=-1).mean(dim=1)


def relations(features: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """Log-probabilities of each place over all, [rows, heads, places, places] float32."""
    parted = features.float().reshape(*features.shape[:2], heads, -1).transpose(1, 2)
    with torch.autocast(features.device.type, enabled=False):
        scores = parted @ parted.transpose(2, 3) / parted.shape[-1] ** 0.5
    if mask is not None:
        # Not infinite: a row of nothing but padding would give a gradient that is not a number.
        scores = scores.masked_fill(~mask[:, None, None, :], -1e9)
    return torch.log_softmax(scores, dim=-1)


class Relations(Distil):
    """Distil the relations of tokens in one layer's attention, which need not have the original's heads.

    heads, layer: as the imitation has them.
    """

    name: ClassVar[str] = "distill.relations"
    breaks: ClassVar[frozenset[Property]] = Distil.breaks | {"factors"}

    heads: int | None = Field(default=None, ge=1)
    layer: int = -1

    def imitations(self, task: Task, layers: int) -> list[Imitation]:
        return [Attention(self.heads, self.layer)]
