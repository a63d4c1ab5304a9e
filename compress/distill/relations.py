"""Relation distillation: the teacher's self-attention relations between tokens as targets."""

from collections.abc import Sequence
from math import gcd
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import kl_div

from compress.distill.distill_stage import DistillStage
from compress.distill.distillation_loss import DistillationLoss, ForwardPass, LayerPair, LossTerms
from laconic.errors import SourceError, UsageError
from laconic.models.anatomy import anatomy
from laconic.recipes.stage import Property
from laconic.tasks.task import Task

MIN_WIDTH = 16
"""The fewest features of a relation head by default."""


class AttentionRelationLoss(DistillationLoss):
    """The Kullback-Leibler divergence of the student's query-query, key-key and value-value relations from the
    teacher's, at each position, the mean over the relation heads and the three kinds (MiniLMv2: Wang et al., 2021,
    arXiv:2012.15828). A relation is the softmax of the scaled dot products of all positions with each other.

    heads: relation heads, into which the features of all attention heads are split anew, so that the student may have
    fewer heads than the teacher; by default as many as both widths allow, of at least 16 features. layer: index of the
    student's layer (its teacher's layer is the one that it replaces), from the end if negative.
    """

    def __init__(self, heads: int | None = None, layer: int = -1, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.heads, self.layer = heads, layer
        self._head_counts: list[int] = []

    def select_layers(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[LayerPair]) -> None:
        try:
            anatomies = anatomy(student), anatomy(teacher)
            for blocks in anatomies:
                blocks.of("heads")
            ours, theirs = anatomies[0].shape, anatomies[1].shape
        except SourceError as error:
            reason = str(error).partition(". ")[0].partition("; ")[0]
            raise UsageError(
                f"there is no attention to distil relations from: {reason}. Use distill.features or distill.logits"
            ) from error
        if not -len(pairs) <= self.layer < len(pairs):
            raise UsageError(f"layer {self.layer} is none of the student's {len(pairs)}. Give one that it has")
        if ours.interleaved or theirs.interleaved:
            raise UsageError(
                "one layer computes queries, keys and values head by head, so that relations cannot be taken from its "
                "output. Use distill.features or distill.logits"
            )
        pair = pairs[self.layer]
        self.student = tuple(f"{pair.student}.{path}" for path in (ours.query, ours.key, ours.value))
        self.teacher = tuple(f"{pair.last}.{path}" for path in (theirs.query, theirs.key, theirs.value))

    def prepare(self, student: ForwardPass, teacher: ForwardPass) -> None:
        both = zip(split_projections(student, self.student), split_projections(teacher, self.teacher), strict=True)
        self._head_counts = [self.count_heads(features.shape[-1], target.shape[-1]) for features, target in both]

    def count_heads(self, ours: int, theirs: int) -> int:
        """Return the number of relation heads for two widths. Raises UsageError if `heads` does not divide them."""
        most = gcd(ours, theirs)
        if self.heads is None:
            return max(
                heads for heads in range(1, most + 1) if most % heads == 0 and most // heads >= min(MIN_WIDTH, most)
            )
        if most % self.heads:
            raise UsageError(
                f"heads: {self.heads} relation heads do not divide {ours} features of the student and {theirs} of the "
                f"teacher evenly. Give a number that divides {most}, or leave heads out"
            )
        return self.heads

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        parts = [
            terms.sum_errors(divergence(features, target, heads, terms.mask))
            for features, target, heads in zip(
                split_projections(student, self.student),
                split_projections(teacher, self.teacher),
                self._head_counts,
                strict=True,
            )
        ]
        return torch.stack(parts).mean()


def split_projections(seen: ForwardPass, names: Sequence[str]) -> tuple[Tensor, ...]:
    """Return queries, keys and values, [rows, positions, features] each; split if one layer computes all three."""
    if len(set(names)) == 1:
        return torch.chunk(seen.outputs[names[0]], 3, dim=-1)
    return tuple(seen.outputs[name] for name in names)


def divergence(features: Tensor, target: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """Return the divergence of the relations at each position, the mean over the heads: [rows, positions] float32.
    mask: [rows, positions] bool, the positions that count."""
    relations, target_relations = log_relations(features, heads, mask), log_relations(target, heads, mask)
    divergences = kl_div(relations, target_relations, reduction="none", log_target=True)
    if mask is not None:
        divergences = divergences.masked_fill(~mask[:, None, None, :], 0.0)
    return divergences.sum(dim=-1).mean(dim=1)


def log_relations(features: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """Return log-probabilities of each position over all positions, [rows, heads, positions, positions] float32."""
    split = features.float().reshape(*features.shape[:2], heads, -1).transpose(1, 2)
    with torch.autocast(features.device.type, enabled=False):
        scores = split @ split.transpose(2, 3) / split.shape[-1] ** 0.5
    if mask is not None:
        # Not infinite: a row of padding alone would have a NaN gradient.
        scores = scores.masked_fill(~mask[:, None, None, :], -1e9)
    return torch.log_softmax(scores, dim=-1)


class RelationDistillation(DistillStage):
    """Train on the self-attention relations of one layer, which need not have the original's heads.

    heads: number of relation heads. layer: index of the student's layer.
    """

    name: ClassVar[str] = "distill.relations"
    breaks: ClassVar[frozenset[Property]] = DistillStage.breaks | {"factors"}

    heads: int | None = Field(default=None, ge=1)
    layer: int = -1

    def losses(self, task: Task, layers: int) -> list[DistillationLoss]:
        return [AttentionRelationLoss(self.heads, self.layer)]
