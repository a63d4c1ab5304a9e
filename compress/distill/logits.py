"""The teacher's probabilities as targets."""

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div, linear
from torch.utils.checkpoint import checkpoint

from compress.distill.distill_stage import Distil
from compress.distill.distillation_loss import Imitation, Terms
from compress.distill.hooks import HIDDEN, Pass
from laconic.errors import UsageError
from laconic.tasks.task import Task

CHUNK = 1024
"""Tokens of a language model whose logits are there at a time."""


class Probabilities(Imitation):
    """T² times the Kullback-Leibler divergence of the student's distribution from the teacher's, both softened by the
    temperature T (Hinton, Vinyals and Dean, 2015, arXiv:1503.02531); the first output's last axis holds the logits. Of
    a language model, at each token; logits of all tokens are never held at once.
    """

    def __init__(self, temperature: float = 2.0, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.temperature = temperature

    def fit(self, student: Pass, teacher: Pass) -> None:
        if HIDDEN in teacher.answers:
            return
        own, theirs = student.first.shape, teacher.first.shape
        if own != theirs or len(own) < 2 or own[-1] < 2:
            raise UsageError(
                f"the student answers with {list(own[1:])} numbers and its teacher with {list(theirs[1:])}; expected "
                f"the logits of the same two classes or more. Distil something else than logits"
            )

    def loss(self, student: Pass, teacher: Pass, terms: Terms) -> Tensor:
        if HIDDEN not in teacher.answers:
            return terms.total(self.divergence(student.first, teacher.first))
        found, wanted = student.answers[HIDDEN].flatten(0, 1), teacher.answers[HIDDEN].flatten(0, 1)
        own, theirs = head(student), head(teacher)
        parts = [
            checkpoint(self.of_hidden, one, two, own, theirs, use_reentrant=False)
            for one, two in zip(torch.split(found, CHUNK), torch.split(wanted, CHUNK), strict=True)
        ]
        return terms.total(torch.cat(parts).reshape(student.answers[HIDDEN].shape[:2]))

    def of_hidden(self, found: Tensor, wanted: Tensor, own: Any, theirs: Any) -> Tensor:
        """The divergence at each token, [tokens], from hidden states [tokens, width]."""
        with torch.no_grad():
            target = linear(wanted, *theirs)
        return self.divergence(linear(found, *own), target)

    def divergence(self, found: Tensor, wanted: Tensor) -> Tensor:
        """Summed over the last axis of logits, float32."""
        likely = (found.float() / self.temperature).log_softmax(dim=-1)
        target = (wanted.float() / self.temperature).log_softmax(dim=-1)
        divergence = kl_div(likely, target, reduction="none", log_target=True).sum(dim=-1) * self.temperature**2
        return divergence.flatten(1).mean(dim=1) if divergence.ndim > 1 else divergence


def head(seen: Pass) -> tuple[Tensor, Tensor | None]:
    """The weights of a language model's last layer."""
    layer: Any = seen.module.head
    return layer.weight, getattr(layer, "bias", None)


class Logits(Distil):
    """Distil the original's probabilities: for classifiers and language models.

    temperature: softens both distributions, so that unlikely classes count.
    """

    name: ClassVar[str] = "distill.logits"

    temperature: float = Field(default=2.0, gt=0)

    def imitations(self, task: Task, layers: int) -> list[Imitation]:
        if not task.has_logits:
            raise UsageError(
                "distill.logits is for classes, and this model answers with vectors. Take distill.embedding"
            )
        return [Probabilities(self.temperature)]
