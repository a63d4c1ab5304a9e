"""Chunked cross-entropy of a linear head over a large vocabulary, with its gradients, a few tokens at a time.

Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009; Hsu et al., "Liger Kernel",
arXiv 2410.10989.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from laconic.errors import TrainingFailure
from laconic.models.language_model import cap_logits
from train.objectives.logit_gradients import cross_entropy_gradients, sum_cross_entropy
from train.offload.chunked_loops import chunks


@dataclass(frozen=True)
class ChunkedLinearCrossEntropy:
    """A `LinearCrossEntropy` that computes the logits of `chunk` tokens at a time.

    Those of no more than `chunk` tokens are computed as without it: the gradient of the weights is then made in the
    backward pass, when activations are freed, and not before it.
    """

    chunk: int

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None
    ) -> Tensor:
        """Sum the losses, [] float32, of hidden [tokens, width], weight [vocab, width], bias [vocab] or None, targets
        [tokens] int64, and the cap of the logits, if there is one."""
        if len(hidden) <= self.chunk:
            return sum_cross_entropy(cap_logits(linear(hidden, weight, bias).float(), cap), targets)
        apply: Any = ChunkedCrossEntropyFunction.apply
        loss: Tensor = apply(hidden, weight, bias, targets, cap, self.chunk, torch.is_grad_enabled())
        return loss


class ChunkedCrossEntropyFunction(torch.autograd.Function):
    """The summed loss. All gradients are computed in the forward pass, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        cap: float | None,
        chunk: int,
        with_gradients: bool,
    ) -> Tensor:
        needs = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        ctx.gradients = HeadGradients.allocate(hidden, weight, bias, *needs)
        total, _ = accumulate_loss(hidden, weight, bias, targets, cap, chunk, ctx.gradients)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        return *ctx.gradients.release(scale), None, None, None, None


@dataclass
class HeadGradients:
    """Buffers for the gradients of a head; None for those that are not needed.

    hidden: [tokens, width] in the dtype of matrix products. weight: [vocab, width] float32. bias: [vocab] float32.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    released: bool = False

    @classmethod
    def allocate(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, *needs: bool) -> "HeadGradients":
        """Allocate buffers for the gradients that are needed: of hidden, weight and bias, in this order."""
        return cls(
            torch.empty_like(hidden, dtype=product_dtype(hidden)) if needs[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if needs[2] and bias is not None else None,
        )

    def add(self, gradient: Tensor, inputs: Tensor, table: Tensor, part: slice) -> None:
        """Accumulate what a chunk of tokens contributes.

        gradient: of the chunk's logits, [tokens, vocab] float32. inputs, table: hidden states of all tokens and weights
        in the dtype of products. part: the tokens of the chunk.
        """
        if self.bias is not None:
            self.bias += gradient.sum(dim=0)
        gradient = gradient.to(table.dtype)
        if self.hidden is not None:
            self.hidden[part] = gradient @ table
        if self.weight is None:
            return
        if gradient.dtype == self.weight.dtype:
            self.weight.addmm_(gradient.T, inputs[part])
            return
        for rows in chunks(len(table), gradient.numel() // inputs.shape[1]):
            self.weight[rows] += gradient[:, rows].T @ inputs[part]

    def release(self, scale: Tensor) -> list[Tensor | None]:
        """Scale the gradients in place and hand them over: a copy of the weight's would be at the peak of the step.

        Raises TrainingFailure if they were released before.
        """
        if self.released:
            raise TrainingFailure(
                "chunked-cross-entropy: the gradient of a loss was taken twice, expected once. Compute the loss again"
            )
        self.released = True
        buffers = (self.hidden, self.weight, self.bias)
        gradients = [None if buffer is None else buffer.mul_(scale) for buffer in buffers]
        self.hidden = self.weight = self.bias = None  # the graph outlives this, and must not keep the buffers
        return gradients


def accumulate_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    cap: float | None,
    chunk: int,
    gradients: HeadGradients,
) -> tuple[Tensor, Tensor]:
    """Sum the loss, [] float32, and compute each token's log-sum-exp of the logits, [tokens] float32.

    The gradients of the loss are added to `gradients`.
    """
    inputs, table = hidden.to(product_dtype(hidden)), weight.to(product_dtype(hidden))
    total = hidden.new_zeros((), dtype=torch.float32)
    log_normalizer = hidden.new_empty(len(hidden), dtype=torch.float32)
    for part in chunks(len(inputs), chunk):
        logits, slope = cap_with_slope(compute_logits(inputs[part], table, bias), cap)
        losses, log_normalizer[part], gradient = cross_entropy_gradients(logits, targets[part])
        total += losses.sum()
        if slope is not None:
            gradient.mul_(slope)
        gradients.add(gradient, inputs, table, part)
        # else two chunks of logits are alive in the next round: 8 to 17 % of a lean step's peak
        del logits, gradient, slope
    return total, log_normalizer


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with these hidden states: autocast's where it is enabled."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def compute_logits(inputs: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
    """Compute logits [tokens, rows of the table] float32, in a tensor that may be overwritten."""
    logits = (inputs @ table.T).float()
    return logits if bias is None else logits.add_(bias)


def cap_with_slope(logits: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Cap logits in place, and return them with their derivative, both [tokens, vocab]; None stands for 1."""
    if cap is None:
        return logits, None
    share = logits.div_(cap).tanh_()
    return share * cap, share.square_().neg_().add_(1)
