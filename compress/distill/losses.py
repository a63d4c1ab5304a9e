"""Losses of distillation: hidden states, soft targets, directions of vectors and their pairwise similarities."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, linear, normalize
from torch.utils.checkpoint import checkpoint

from compress.distill.distillation_loss import (
    HIDDEN,
    DistillationLoss,
    ForwardPass,
    LayerPair,
    LossTerms,
    flatten_positions,
    relative_error,
)
from laconic.errors import UsageError
from laconic.models.language_model import cap_logits

Layers = Literal["all", "last"]


class HiddenStateLoss(DistillationLoss):
    """The squared error of the student's hidden states relative to the teacher's square, at each position; the mean
    over the layers (FitNets: Romero et al., 2015, arXiv:1412.6550; TinyBERT: Jiao et al., 2020, arXiv:1909.10351).

    layers: all layers, or the last. project: train a linear layer from the student's width to the teacher's for each
    layer, initialised as the identity and discarded afterwards; by default where the widths differ.
    """

    def __init__(self, layers: Layers = "all", project: bool | None = None, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.layers, self.project = layers, project

    def select_layers(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[LayerPair]) -> None:
        if not pairs:
            raise UsageError(
                f"there are no hidden states to match: {type(teacher).__name__} has no repeated layers that the "
                f"student has too. Use distill.logits, or distill.embedding for vectors"
            )
        chosen = pairs[-1:] if self.layers == "last" else pairs
        self.student = tuple(pair.student for pair in chosen)
        self.teacher = tuple(pair.last for pair in chosen)

    def prepare(self, student: ForwardPass, teacher: ForwardPass) -> None:
        self.auxiliary = nn.ModuleList()
        for ours, theirs in zip(self.student, self.teacher, strict=True):
            hidden, target = flatten_positions(student.outputs[ours]), flatten_positions(teacher.outputs[theirs])
            if hidden.shape[:2] != target.shape[:2]:
                raise UsageError(
                    f"layer {ours} of the student has {hidden.shape[1]} positions, and {theirs} of its teacher "
                    f"{target.shape[1]}: they cannot be compared. Use distill.logits"
                )
            differ = hidden.shape[2] != target.shape[2]
            if differ and self.project is False:
                raise UsageError(
                    f"layer {ours} of the student is {hidden.shape[2]} wide, and {theirs} of its teacher "
                    f"{target.shape[2]}. Leave project out, so that a projection between them is trained"
                )
            self.auxiliary.append(make_projection(hidden, target) if self.project or differ else nn.Identity())

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        total = student.first.new_zeros((), dtype=flatten_positions(student.first[:0]).dtype)
        for ours, theirs, project in zip(self.student, self.teacher, self.auxiliary, strict=True):
            hidden = project(flatten_positions(student.outputs[ours])).float()
            total = total + terms.sum_errors(relative_error(hidden, flatten_positions(teacher.outputs[theirs])))
        return total / len(self.student)


def make_projection(hidden: Tensor, target: Tensor) -> nn.Linear:
    """Return a linear layer from the student's width to the teacher's, initialised as the identity as far as both
    go."""
    layer = nn.Linear(hidden.shape[2], target.shape[2], device=hidden.device)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


CHUNK = 1024
"""Tokens of a language model whose logits are computed at a time."""


class SoftTargetLoss(DistillationLoss):
    """T² times the Kullback-Leibler divergence of the student's distribution from the teacher's, both softened by the
    temperature T (Hinton, Vinyals & Dean, Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531). The
    last axis of the first output holds the logits. For a language model at each token, in chunks of tokens, so that the
    logits of all tokens are never in memory at once.
    """

    def __init__(self, temperature: float = 2.0, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.temperature = temperature

    def prepare(self, student: ForwardPass, teacher: ForwardPass) -> None:
        if HIDDEN in teacher.answers:
            return
        ours, theirs = student.first.shape, teacher.first.shape
        if ours != theirs or len(ours) < 2 or ours[-1] < 2:
            raise UsageError(
                f"the student's outputs have the shape {list(ours[1:])} and its teacher's {list(theirs[1:])}; expected "
                f"the logits of the same two classes or more. Distil something other than logits"
            )

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        if HIDDEN not in teacher.answers:
            return terms.sum_errors(self.divergence(student.first, teacher.first))
        hidden, target = student.answers[HIDDEN].flatten(0, 1), teacher.answers[HIDDEN].flatten(0, 1)
        head, teacher_head = head_weights(student), head_weights(teacher)
        model: Any = teacher.module
        cap = model.logit_cap
        parts = [
            checkpoint(self.divergence_of_hidden, some, some_targets, head, teacher_head, cap, use_reentrant=False)
            for some, some_targets in zip(torch.split(hidden, CHUNK), torch.split(target, CHUNK), strict=True)
        ]
        return terms.sum_errors(torch.cat(parts).reshape(student.answers[HIDDEN].shape[:2]))

    def divergence_of_hidden(
        self, hidden: Tensor, target: Tensor, head: Any, teacher_head: Any, cap: float | None
    ) -> Tensor:
        """Return the divergence at each token, [tokens], from hidden states [tokens, width], the weights of both heads,
        and the cap of the logits."""
        with torch.no_grad():
            target_logits = cap_logits(linear(target, *teacher_head), cap)
        return self.divergence(cap_logits(linear(hidden, *head), cap), target_logits)

    def divergence(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the divergence of logits, summed over their last axis and averaged over all others but the first,
        float32."""
        likely = (logits.float() / self.temperature).log_softmax(dim=-1)
        target = (teacher_logits.float() / self.temperature).log_softmax(dim=-1)
        divergence = kl_div(likely, target, reduction="none", log_target=True).sum(dim=-1) * self.temperature**2
        return divergence.flatten(1).mean(dim=1) if divergence.ndim > 1 else divergence


def head_weights(seen: ForwardPass) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a language model's head."""
    layer: Any = seen.module.head
    return layer.weight, getattr(layer, "bias", None)


class CosineLoss(DistillationLoss):
    """1 - the cosine similarity of the student's and the teacher's vector, for each row."""

    def prepare(self, student: ForwardPass, teacher: ForwardPass) -> None:
        ours, theirs = student.first.shape, teacher.first.shape
        if ours != theirs or len(ours) != 2:
            raise UsageError(
                f"the student's outputs have the shape {list(ours[1:])} and its teacher's {list(theirs[1:])}; expected "
                f"one vector a row, of the same size. Keep the width of the model's last layer"
            )

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        vectors, targets = normalize_vectors(student), normalize_vectors(teacher)
        return terms.sum_errors(1 - (vectors * targets).sum(dim=1))


class SimilarityLoss(DistillationLoss):
    """The squared error of each row's cosine similarities with the other rows of the batch, the mean over those
    (similarity-preserving distillation: Tung & Mori, 2019, arXiv:1907.09682, with cosines in place of normalised dot
    products)."""

    compares_rows: ClassVar[bool] = True

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        vectors, targets = normalize_vectors(student), normalize_vectors(teacher)
        errors = (vectors @ vectors.T - targets @ targets.T).square()
        return terms.sum_errors(errors.sum(dim=1) / max(len(errors) - 1, 1))


def normalize_vectors(seen: ForwardPass) -> Tensor:
    """Return the first output as vectors of length 1, [rows, features] float32."""
    with torch.autocast(seen.first.device.type, enabled=False):
        return normalize(seen.first.float(), dim=-1)
