"""The cross-entropy of each token under a linear head, for losses that are no sum over tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from laconic.models.language_model import cap_logits
from laconic.tasks.token_positions import IGNORED
from train.objectives.linear_cross_entropy import HeadGradients, cap_with_slope, compute_logits, product_dtype
from train.objectives.logit_gradients import cross_entropy_gradients, token_cross_entropy
from train.offload.chunked_loops import chunks

TokenLosses = Callable[[Tensor, Tensor, Tensor | None, Tensor, float | None], Tensor]
"""(hidden [tokens, width], weight [vocab, width], bias [vocab] or None, targets [tokens] int64, cap of the logits or
None) to the loss of each token, [tokens] float32; 0 for a target of IGNORED."""


def whole_token_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None
) -> Tensor:
    """Compute the losses, as `TokenLosses`, with the logits of all tokens at once."""
    return token_cross_entropy(cap_logits(linear(hidden, weight, bias).float(), cap), targets)


@dataclass(frozen=True)
class ChunkedTokenLosses:
    """A `TokenLosses` that computes the logits of `chunk` tokens at a time, and once more in the backward pass: what a
    token's loss counts for is known only then."""

    chunk: int

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None
    ) -> Tensor:
        """Compute the losses; of no more than `chunk` tokens as without it."""
        if len(hidden) <= self.chunk:
            return whole_token_losses(hidden, weight, bias, targets, cap)
        apply: Any = ChunkedTokenLossesFunction.apply
        losses: Tensor = apply(hidden, weight, bias, targets, cap, self.chunk)
        return losses


class ChunkedTokenLossesFunction(torch.autograd.Function):
    """The loss of each token. The logits are computed in both passes, and kept in neither."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        cap: float | None,
        chunk: int,
    ) -> Tensor:
        ctx.cap, ctx.chunk, ctx.dtype = cap, chunk, product_dtype(hidden)
        inputs, table = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        losses, log_normalizer = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        for part in chunks(len(inputs), chunk):
            logits, slope = cap_with_slope(compute_logits(inputs[part], table, bias), cap)
            losses[part], log_normalizer[part], gradient = cross_entropy_gradients(logits, targets[part])
            del logits, slope, gradient  # as in `accumulate_loss`
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer)
        return losses

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        hidden, weight, bias, targets, log_normalizer = ctx.saved_tensors
        gradients = HeadGradients.allocate(hidden, weight, bias, *ctx.needs_input_grad[:3])
        inputs, table = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        factor = (scale * (targets != IGNORED))[:, None]
        for part in chunks(len(inputs), ctx.chunk):
            logits, slope = cap_with_slope(compute_logits(inputs[part], table, bias), ctx.cap)
            gradient = logits.sub_(log_normalizer[part, None]).exp_()
            index = targets[part, None].clamp(min=0)
            gradient.scatter_add_(1, index, -torch.ones_like(index, dtype=gradient.dtype)).mul_(factor[part])
            if slope is not None:
                gradient.mul_(slope)
            gradients.add(gradient, inputs, table, part)
            del logits, slope, gradient, index
        return gradients.hidden, gradients.weight, gradients.bias, None, None, None
