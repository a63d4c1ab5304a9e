"""Chunked cross-entropy of a tied head, whose weight gradient is deferred until the activations are freed.

The head shares its weights with the embedding. Autograd would hold the head's gradient of the weights through the whole
backward pass, until it adds the embedding's. Here the head's part is computed at the end, chunk by chunk, and added to
the embedding's gradient in place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from laconic.errors import TrainingFailure
from laconic.tasks.token_positions import IGNORED
from train.objectives.linear_cross_entropy import (
    ChunkedLinearCrossEntropy,
    HeadGradients,
    accumulate_loss,
    cap_with_slope,
    compute_logits,
    product_dtype,
)
from train.offload.chunked_loops import chunks


@dataclass(frozen=True)
class PendingGradient:
    """What is needed to compute the head's gradient of its weights later.

    hidden: [tokens, width]. cap: of the logits. log_normalizer: each token's log-sum-exp of the logits, [tokens]
    float32. scale: of the loss, [] float32. dtype: of matrix products.
    """

    hidden: Tensor
    bias: Tensor | None
    targets: Tensor
    cap: float | None
    log_normalizer: Tensor
    scale: Tensor
    dtype: torch.dtype


@dataclass
class DeferredLinearCrossEntropy:
    """A `LinearCrossEntropy` that defers the gradient of the weights.

    It is pending until the backward pass reaches the embedding, which is its last node. There the logits are recomputed
    for a chunk of the vocabulary at a time, and their gradient is added to the embedding's.
    """

    chunk: int
    pending: list[PendingGradient] = field(default_factory=list)

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None
    ) -> Tensor:
        """Compute the loss as `ChunkedLinearCrossEntropy`. Raises TrainingFailure if a gradient is still pending."""
        if self.pending:
            raise TrainingFailure(
                "chunked-cross-entropy: a gradient of the head is still pending, expected none before the next forward "
                "pass: the backward pass did not reach the embedding. Set defer: false"
            )
        if not (torch.is_grad_enabled() and weight.requires_grad and hidden.requires_grad):
            return ChunkedLinearCrossEntropy(self.chunk)(hidden, weight, bias, targets, cap)
        apply: Any = DeferredCrossEntropyFunction.apply
        loss: Tensor = apply(hidden, weight.detach(), bias, targets, cap, self)
        return loss

    def make_embedding_forward(self, table: nn.Embedding) -> Callable[[Tensor], Tensor]:
        """Make a forward function for the embedding, whose backward pass adds the pending gradients."""
        apply: Any = TiedEmbeddingFunction.apply
        return lambda ids: apply(table.weight, ids, table.padding_idx, self)

    def add_pending(self, weight: Tensor, gradient: Tensor) -> None:
        """Add all pending gradients to the gradient of the weights, [vocab, width], in place."""
        while self.pending:
            one = self.pending.pop()
            inputs = one.hidden.to(one.dtype)
            factor = (one.targets != IGNORED)[:, None] * one.scale
            for rows in chunks(len(weight), self.chunk * len(weight) // len(inputs)):
                bias = None if one.bias is None else one.bias[rows]
                logits, slope = cap_with_slope(compute_logits(inputs, weight[rows].to(one.dtype), bias), one.cap)
                softmax = logits.sub_(one.log_normalizer[:, None]).exp_()
                index = one.targets - rows.start
                here = (index >= 0) & (index < softmax.shape[1])
                softmax.scatter_add_(1, index.clamp(0, softmax.shape[1] - 1)[:, None], -here[:, None].float())
                if slope is not None:
                    softmax.mul_(slope)
                gradient[rows] += softmax.mul_(factor).to(one.dtype).T @ inputs
                del logits, slope, softmax, index, here  # as in `accumulate_loss`


class DeferredCrossEntropyFunction(torch.autograd.Function):
    """The summed loss, with the gradients of the hidden states and the bias; that of the weights becomes pending."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        cap: float | None,
        deferred: DeferredLinearCrossEntropy,
    ) -> Tensor:
        ctx.gradients = HeadGradients.allocate(hidden, weight, bias, True, False, ctx.needs_input_grad[2])
        total, log_normalizer = accumulate_loss(hidden, weight, bias, targets, cap, deferred.chunk, ctx.gradients)
        ctx.deferred, ctx.cap, ctx.dtype = deferred, cap, product_dtype(hidden)
        ctx.save_for_backward(hidden, bias, targets, log_normalizer)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        hidden, bias, targets, log_normalizer = ctx.saved_tensors
        ctx.deferred.pending.append(PendingGradient(hidden, bias, targets, ctx.cap, log_normalizer, scale, ctx.dtype))
        return *ctx.gradients.release(scale), None, None, None


class TiedEmbeddingFunction(torch.autograd.Function):
    """An embedding whose backward pass adds the head's pending gradient: weight [vocab, width], ids int64."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, deferred: DeferredLinearCrossEntropy
    ) -> Tensor:
        ctx.deferred, ctx.padding = deferred, -1 if padding is None else padding
        ctx.save_for_backward(weight, ids)
        return embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, ids = ctx.saved_tensors
        total = torch.ops.aten.embedding_dense_backward(gradient, ids, len(weight), ctx.padding, False)
        ctx.deferred.add_pending(weight, total)
        return total, None, None, None
