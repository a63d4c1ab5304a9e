"""One step of training: the gradient of a batch's mean loss, and what the optimizer makes of it."""

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from laconic.training.step.objective import Batch
from laconic.training.step.parts import Kit


def step(kit: Kit, batch: Batch, *, clip: float | None = None) -> Tensor:
    """Learn from one batch, and give its mean loss as it was before, [] float32 without a gradient.

    The batch is taken in micro-batches of `kit.rows` rows. Each contributes the sum of its terms divided by the terms
    of the whole batch, over all ranks: so a ragged batch has the same mean, and the same gradient, however it is cut.
    clip: the largest norm of the gradient; None leaves it.
    """
    parts = kit.split(batch)
    total = kit.total(sum(kit.objective.terms(part) for part in parts))
    loss = torch.zeros((), device=kit.device)
    for number, part in enumerate(parts, 1):
        with kit.synchronised(kit.lesson, number == len(parts)):
            with kit.span("forward"), kit.passing():
                value = kit.lesson(part) / total
            with kit.span("backward"):
                kit.scaler.scale(value).backward()
        loss += value.detach()
        del value
    with kit.span("optimizer"):
        kit.scaler.unscale_(kit.optimizer)
        if clip is not None:
            kit.norm = clip_grad_norm_(trained(kit.module), clip).detach()
        kit.scaler.step(kit.optimizer)
        kit.scaler.update()
        kit.optimizer.zero_grad(set_to_none=True)
    return kit.average(loss)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
