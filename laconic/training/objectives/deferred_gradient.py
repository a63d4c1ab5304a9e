"""The gradient of a head that shares its weights with the embedding, computed when the activations are gone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from laconic.errors import TrainingFailure
from laconic.offload.memory_accounting import alike
from laconic.training.objectives.linear_cross_entropy import Chunked, Grads, logits_of, pieces, precision, sweep
from laconic.training.objectives.next_token import IGNORED


@dataclass(frozen=True)
class Due:
    """A gradient that is still to be computed.

    hidden: [tokens, width]. normaliser: the log of each token's sum of exponentials, [tokens] float32. scale: of the
    loss, [] float32. dtype: of products.
    """

    hidden: Tensor
    bias: Tensor | None
    targets: Tensor
    normaliser: Tensor
    scale: Tensor
    dtype: torch.dtype


@dataclass
class Late:
    """Wears the interface of `LinearCrossEntropy`. The gradient of the weights is due until the backward pass comes to
    the embedding, which is its last: the embedding's gradient takes it up, some words at a time."""

    chunk: int
    due: list[Due] = field(default_factory=list)

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """As `Chunked`."""
        if self.due:
            raise TrainingFailure(
                "chunked-loss: a gradient of the head is still due, expected none before the next forward pass: the "
                "backward pass did not come to the embedding. Set defer: false"
            )
        if not (torch.is_grad_enabled() and weight.requires_grad and hidden.requires_grad):
            return Chunked(self.chunk)(hidden, weight, bias, targets)
        apply: Any = Head.apply
        loss: Tensor = apply(hidden, weight.detach(), bias, targets, self)
        return loss

    def forward(self, table: nn.Embedding) -> Callable[[Tensor], Tensor]:
        """What the embedding does in the forward pass, with a backward pass that takes up what is due."""
        apply: Any = Table.apply
        return lambda ids: apply(table.weight, ids, table.padding_idx, self)

    def settle(self, weight: Tensor, gradient: Tensor) -> None:
        """Add all that is due to the gradient of the weights, [vocab, width], in place."""
        while self.due:
            one = self.due.pop()
            inputs = one.hidden.to(one.dtype)
            factor = (one.targets != IGNORED)[:, None] * one.scale
            for rows in alike(pieces(len(weight), self.chunk * len(weight) // len(inputs))):
                bias = None if one.bias is None else one.bias[rows]
                slope = logits_of(inputs, weight[rows].to(one.dtype), bias).sub_(one.normaliser[:, None]).exp_()
                place = one.targets - rows.start
                here = (place >= 0) & (place < slope.shape[1])
                slope.scatter_add_(1, place.clamp(0, slope.shape[1] - 1)[:, None], -here[:, None].float())
                gradient[rows] += slope.mul_(factor).to(one.dtype).T @ inputs


class Head(torch.autograd.Function):
    """The summed loss, with the gradients of the hidden states and the bias."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, late: Late) -> Tensor:
        ctx.grads = Grads.of(hidden, weight, bias, True, False, ctx.needs_input_grad[2])
        total, normaliser = sweep(hidden, weight, bias, targets, late.chunk, ctx.grads)
        ctx.late, ctx.dtype = late, precision(hidden)
        ctx.save_for_backward(hidden, bias, targets, normaliser)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        hidden, bias, targets, normaliser = ctx.saved_tensors
        ctx.late.due.append(Due(hidden, bias, targets, normaliser, scale, ctx.dtype))
        return *ctx.grads.scaled(scale), None, None


class Table(torch.autograd.Function):
    """An embedding: weight [vocab, width], ids of any shape int64."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, late: Late) -> Tensor:
        ctx.late, ctx.padding = late, -1 if padding is None else padding
        ctx.save_for_backward(weight, ids)
        return embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, ids = ctx.saved_tensors
        total = torch.ops.aten.embedding_dense_backward(gradient, ids, len(weight), ctx.padding, False)
        ctx.late.settle(weight, total)
        return total, None, None, None
