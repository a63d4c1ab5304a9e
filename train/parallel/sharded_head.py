"""Cross-entropy of a head whose vocabulary is spread over ranks, without the logits of all of it on any rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from laconic.models.language_model import cap_logits
from laconic.tasks.token_positions import IGNORED
from train.objectives.logit_gradients import sum_cross_entropy
from train.parallel.tensor_styles import sum_gradient


def sharded_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None
) -> Tensor:
    """Sum the loss as a `LinearCrossEntropy` (loss parallelism: Shoeybi et al., arXiv 1909.08053, section 3). The
    weight is a distributed tensor, sharded by rows or replicated."""
    assert isinstance(weight, DTensor)
    table, offsets = weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias
    (placement,), mesh = weight.placements, weight.device_mesh
    inputs = hidden if placement.is_replicate() else sum_gradient(hidden, mesh)
    logits = cap_logits(linear(inputs, table, offsets).float(), cap)
    if placement.is_replicate():
        return sum_cross_entropy(logits, targets)
    start = mesh.get_local_rank() * -(-len(weight) // mesh.size())
    apply: Any = ShardedLogitGradients.apply
    loss: Tensor = apply(logits, targets, start, mesh.get_group())
    return loss


class ShardedLogitGradients(torch.autograd.Function):
    """The summed loss of logits [tokens, part of the vocabulary from `start` on]. The gradient takes the place of the
    logits in the forward pass, and is scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
        counted = (targets != IGNORED)[:, None]
        index = (targets - start)[:, None]
        is_here = counted & (index >= 0) & (index < logits.shape[1])
        index = index.clamp(0, logits.shape[1] - 1)
        top = logits.amax(dim=1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        picked = (logits.gather(1, index) - top) * is_here
        sums = torch.cat([picked, logits.sub_(top).exp_().sum(dim=1, keepdim=True)], dim=1)
        dist.all_reduce(sums, group=group)
        picked, total = sums[:, :1], sums[:, 1:]
        logits.mul_(counted / total).scatter_add_(1, index, -is_here.to(logits.dtype))
        ctx.gradient = logits
        loss: Tensor = ((total.log() - picked) * counted).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradient, ctx.gradient = ctx.gradient, None  # the graph outlives this, and must not keep it
        return gradient.mul_(scale), None, None, None
