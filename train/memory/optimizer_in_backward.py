"""Optimizer in backward: each parameter is updated as soon as its gradient is complete."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from train.optimizers.optimizer import Groups
from train.step.step_parts import OptimizerFactory, StepParts
from train.step.technique import Proposal, Technique


class OptimizerInBackward(Technique):
    """Runs the optimizer's step within the backward pass, a parameter at a time, and frees the gradient (Lv et al.,
    LOMO, arXiv 2306.09782). The updated parameters are bit-identical.

    The optimizer keeps its interface: its step after the backward pass finds no gradient, and does nothing.
    """

    slot = "optimizer"
    exact = True
    excludes: ClassVar[Mapping[str, str]] = {
        "gradient-accumulation": "gradients of several micro-batches would have to wait for the last",
        "max_grad_norm": "the norm of the whole gradient is known only when all of it is there",
        "fp16": "an overflow can be detected only when the whole gradient is there",
        "replicate": "a gradient is averaged over the ranks after it would have been used",
        "shard": "a gradient is averaged over the ranks after it would have been used",
    }
    requires_of_optimizer = ("per-parameter",)

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return (Proposal("grid"),)

    def apply(self, parts: StepParts) -> None:
        def make_hooked(make: OptimizerFactory, groups: Groups) -> Optimizer:
            optimizer = make(groups)
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    hook = parameter.register_post_accumulate_grad_hook(partial(step_parameter, optimizer, index))
                    parts.on_restore(hook.remove)
            return optimizer

        parts.wrap_optimizer(make_hooked)


def step_parameter(optimizer: Optimizer, index: int, parameter: Tensor) -> None:
    """Update one parameter, of the group of this index, and free its gradient."""
    groups = optimizer.param_groups
    group = groups[index]
    members = group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, group["params"] = groups, members
    parameter.grad = None
