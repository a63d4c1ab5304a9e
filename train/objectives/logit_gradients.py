"""Cross-entropy of logits whose gradient takes their place: one tensor of the vocabulary's size in place of three."""

from typing import Any

import torch
from torch import Tensor

from laconic.errors import TrainingFailure
from laconic.tasks.token_positions import IGNORED


def sum_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross-entropy of each token, as `token_cross_entropy` computes it: [] float32."""
    return token_cross_entropy(logits, targets).sum()


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross-entropy of logits [tokens, classes] and targets [tokens] int64, [tokens] float32; 0 where a
    target is IGNORED.

    The logits are overwritten by their gradient, which the backward pass scales. torch's own cross_entropy holds the
    logits, their log-softmax and two gradients; this takes 0.75 to 0.93 of its time for 4,096 to 50,257 classes
    (`benchmarks/losses.py`, one thread of a processor with AVX512). The last operation before the logits must not need
    its result for its own gradient: that of a linear layer or of a cast does not.
    """
    apply: Any = LogitGradients.apply
    losses: Tensor = apply(logits.float(), targets)
    return losses


class LogitGradients(torch.autograd.Function):
    """The loss of each token. The gradient is computed in the forward pass, and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        losses, _, ctx.gradient = cross_entropy_gradients(logits, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        if ctx.gradient is None:
            raise TrainingFailure(
                "the gradient of a cross-entropy was taken twice, expected once. Compute the loss again"
            )
        gradient, ctx.gradient = ctx.gradient, None  # the graph outlives this, and must not keep it
        return gradient.mul_(scale[:, None]), None


def cross_entropy_gradients(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the losses of some tokens [tokens], their log-sum-exps [tokens], and the gradient of the losses by the
    logits [tokens, classes].

    The gradient overwrites the logits.
    """
    counted = (targets != IGNORED)[:, None]
    index = targets[:, None].clamp(min=0)
    top = logits.amax(dim=1, keepdim=True)
    picked = logits.gather(1, index).sub_(top)
    total = logits.sub_(top).exp_().sum(dim=1, keepdim=True)
    logits.mul_(counted / total)
    logits.scatter_(1, index, (picked.exp() / total - 1) * counted)
    return ((total.log() - picked) * counted)[:, 0], (total.log() + top)[:, 0], logits
