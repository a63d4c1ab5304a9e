"""The loss of a head over a large vocabulary, and its gradients, for a few tokens at a time."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.errors import TrainingFailure
from laconic.offload.memory_accounting import alike
from laconic.training.objectives.next_token import IGNORED


@dataclass(frozen=True)
class Chunked:
    """Wears the interface of `LinearCrossEntropy`, with the logits of `chunk` tokens at a time."""

    chunk: int

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """The sum of the losses, [] float32, of hidden [tokens, width], weight [vocab, width], bias [vocab] or None and
        targets [tokens] int64."""
        apply: Any = Head.apply
        loss: Tensor = apply(hidden, weight, bias, targets, self.chunk, torch.is_grad_enabled())
        return loss


class Head(torch.autograd.Function):
    """The summed loss; every gradient is computed with it, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, learns: bool
    ) -> Tensor:
        needs = [learns and needed for needed in ctx.needs_input_grad[:3]]
        ctx.grads = Grads.of(hidden, weight, bias, *needs)
        total, _ = sweep(hidden, weight, bias, targets, chunk, ctx.grads)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        return *ctx.grads.scaled(scale), None, None, None


@dataclass
class Grads:
    """hidden: [tokens, width] in the precision of products. weight: [vocab, width] float32. bias: [vocab] float32. None
    where it is not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    used: bool = False

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, *needs: bool) -> "Grads":
        """Room for those that are needed."""
        return cls(
            torch.empty_like(hidden, dtype=precision(hidden)) if needs[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if needs[2] and bias is not None else None,
        )

    def add(self, slope: Tensor, inputs: Tensor, table: Tensor, part: slice) -> None:
        """What the slopes of a part of the tokens, [tokens, vocab] float32, give."""
        if self.bias is not None:
            self.bias += slope.sum(dim=0)
        slope = slope.to(table.dtype)
        if self.hidden is not None:
            self.hidden[part] = slope @ table
        if self.weight is None:
            return
        if slope.dtype == self.weight.dtype:
            self.weight.addmm_(slope.T, inputs[part])
            return
        for rows in alike(pieces(len(table), slope.numel() // inputs.shape[1])):
            self.weight[rows] += slope[:, rows].T @ inputs[part]

    def scaled(self, scale: Tensor) -> list[Tensor | None]:
        """All of them times a scale, in place: a second copy of the weight's would be at the peak of the step."""
        if self.used:
            raise TrainingFailure(
                "chunked-loss: the gradient of a loss was taken twice, expected once. Compute it again"
            )
        self.used = True
        found = [None if grad is None else grad.mul_(scale) for grad in (self.hidden, self.weight, self.bias)]
        self.hidden = self.weight = self.bias = None  # the graph lives on: what it gave away is not its to keep
        return found


def sweep(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, grads: Grads
) -> tuple[Tensor, Tensor]:
    """The summed loss, [] float32, and the log of each token's sum of exponentials, [tokens] float32."""
    inputs, table = hidden.to(precision(hidden)), weight.to(precision(hidden))
    total = hidden.new_zeros((), dtype=torch.float32)
    normaliser = hidden.new_empty(len(hidden), dtype=torch.float32)
    for part in alike(pieces(len(inputs), chunk)):
        loss, normaliser[part], slope = slopes(logits_of(inputs[part], table, bias), targets[part])
        total += loss
        grads.add(slope, inputs, table, part)
    return total, normaliser


def pieces(total: int, size: int) -> list[slice]:
    """Slices of at most `size`, and at least 1, that cover `total`."""
    size = max(1, size)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def precision(hidden: Tensor) -> torch.dtype:
    """Of products with these hidden states, here: autocast's where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def logits_of(inputs: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
    """[tokens, rows of the table] float32, to be written over."""
    logits = (inputs @ table.T).float()
    return logits if bias is None else logits.add_(bias)


def slopes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of some tokens, the log of each one's sum of exponentials, [tokens], and the derivative of the
    loss by the logits, [tokens, vocab], which is written over them."""
    counted = (targets != IGNORED)[:, None]
    index = targets[:, None].clamp(min=0)
    top = logits.amax(dim=1, keepdim=True)
    picked = logits.gather(1, index).sub_(top)
    total = logits.sub_(top).exp_().sum(dim=1, keepdim=True)
    logits.mul_(counted / total)
    logits.scatter_(1, index, (picked.exp() / total - 1) * counted)
    return ((total.log() - picked) * counted).sum(), (total.log() + top)[:, 0], logits
