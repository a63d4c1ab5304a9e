"""The loss of soft targets: the teacher's class or token probabilities."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear
from torch.utils.checkpoint import checkpoint

from compress.distill.distillation_loss import DistillationLoss, LossTerms
from compress.distill.forward_pass import HIDDEN, ForwardPass
from laconic.errors import UsageError
from laconic.models.language_model import cap_logits

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
        own, theirs = student.first.shape, teacher.first.shape
        if own != theirs or len(own) < 2 or own[-1] < 2:
            raise UsageError(
                f"the student's outputs have the shape {list(own[1:])} and its teacher's {list(theirs[1:])}; expected "
                f"the logits of the same two classes or more. Distil something other than logits"
            )

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        if HIDDEN not in teacher.answers:
            return terms.sum_errors(self.divergence(student.first, teacher.first))
        found, wanted = student.answers[HIDDEN].flatten(0, 1), teacher.answers[HIDDEN].flatten(0, 1)
        own, theirs = head_weights(student), head_weights(teacher)
        model: Any = teacher.module
        cap = model.logit_cap
        parts = [
            checkpoint(self.divergence_of_hidden, one, two, own, theirs, cap, use_reentrant=False)
            for one, two in zip(torch.split(found, CHUNK), torch.split(wanted, CHUNK), strict=True)
        ]
        return terms.sum_errors(torch.cat(parts).reshape(student.answers[HIDDEN].shape[:2]))

    def divergence_of_hidden(self, found: Tensor, wanted: Tensor, own: Any, theirs: Any, cap: float | None) -> Tensor:
        """The divergence at each token, [tokens], from hidden states [tokens, width], the weights of both heads, and
        the cap of the logits."""
        with torch.no_grad():
            target = cap_logits(linear(wanted, *theirs), cap)
        return self.divergence(cap_logits(linear(found, *own), cap), target)

    def divergence(self, found: Tensor, wanted: Tensor) -> Tensor:
        """The divergence of logits, summed over their last axis and averaged over all others but the first, float32."""
        likely = (found.float() / self.temperature).log_softmax(dim=-1)
        target = (wanted.float() / self.temperature).log_softmax(dim=-1)
        divergence = kl_div(likely, target, reduction="none", log_target=True).sum(dim=-1) * self.temperature**2
        return divergence.flatten(1).mean(dim=1) if divergence.ndim > 1 else divergence


def head_weights(seen: ForwardPass) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a language model's head."""
    layer: Any = seen.module.head
    return layer.weight, getattr(layer, "bias", None)
