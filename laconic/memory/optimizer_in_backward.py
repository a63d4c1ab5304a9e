"""An optimizer that steps each parameter as soon as its gradient is there, so that no two wait together."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from laconic.training.optimizers import Groups
from laconic.training.step.step_parts import OptimizerFactory, StepParts
from laconic.training.step.technique import Slot, Technique


class InBackward(Technique):
    """The optimizer steps in the backward pass, a parameter at a time, and the gradient is freed (Lv et al., LOMO,
    arXiv 2306.09782). The parameters are the same to the bit.

    The optimizer stays what it is: its step after the pass finds no gradient, and does nothing.
    """

    slot: ClassVar[Slot] = "optimizer"
    exact: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "accumulate": "gradients of several parts would have to wait for the last",
        "max_grad_norm": "the norm of the whole gradient is known only when all of it is there",
        "fp16": "the loss scale can be judged only when the whole gradient is there",
        "replicate": "a gradient is averaged over the ranks after it would have been used",
        "shard": "a gradient is averaged over the ranks after it would have been used",
    }
    requires_of_optimizer: ClassVar[Sequence[str]] = ("per-parameter",)

    def apply(self, parts: StepParts) -> None:
        def make_hooked(make: OptimizerFactory, groups: Groups) -> Optimizer:
            optimizer = make(groups)
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    hook = parameter.register_post_accumulate_grad_hook(partial(step_alone, optimizer, number))
                    parts.on_restore(hook.remove)
            return optimizer

        parts.wrap_optimizer(make_hooked)


def step_alone(optimizer: Optimizer, number: int, parameter: Tensor) -> None:
    """Step one parameter, of the group of this number, and free its gradient."""
    groups = optimizer.param_groups
    group = groups[number]
    members = group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, group["params"] = groups, members
    parameter.grad = None
