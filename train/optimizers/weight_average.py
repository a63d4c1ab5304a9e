"""The exponential moving average of the weights, kept in the state of their optimizer."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from train.optimizers.parameterwise import local

AVERAGE, AVERAGED = "average", "averaged"
"""The keys of a parameter's state: its average, and how many steps are in it."""


def average_weights(optimizer: Optimizer, decay: float) -> Optimizer:
    """Average the weights over the steps of an optimizer (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992).

    A step counts (1 - decay) of the average; in the beginning more, so that the first weights are soon forgotten: the
    decay is at most (1 + n) / (10 + n) after n steps, as in TensorFlow's `ExponentialMovingAverage`. A parameter
    without a gradient keeps its average. The average has the dtype, device and sharding of its parameter.
    """

    @torch.no_grad()
    def update(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        for group in stepped.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = stepped.state[parameter]
                if AVERAGE not in state:
                    state |= {AVERAGE: torch.zeros_like(parameter), AVERAGED: 0}
                count = state[AVERAGED]
                share = 1.0 if not count else 1 - min(decay, (1 + count) / (10 + count))
                local(state[AVERAGE]).lerp_(local(parameter), share)
                state[AVERAGED] = count + 1

    optimizer.register_step_post_hook(update)
    return optimizer


def find_average(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    """Find the average of a parameter; None where it has none."""
    average: Tensor | None = optimizer.state.get(parameter, {}).get(AVERAGE)
    return average


@torch.no_grad()
def zero_weights(optimizer: Optimizer, parameter: Tensor, mask: Tensor) -> None:
    """Set weights to zero, and their averages. mask: where, bool [as this rank's shard of the parameter]."""
    for values in (parameter, find_average(optimizer, parameter)):
        if values is not None:
            local(values).masked_fill_(mask, 0.0)


@torch.no_grad()
def exchange_weights(optimizer: Optimizer) -> bool:
    """Exchange all weights with their averages, in place, one after the other. Returns whether there are any."""
    are_averaged = False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (average := find_average(optimizer, parameter)) is not None:
                are_averaged = True
                before = local(parameter).clone()
                local(parameter).copy_(local(average))
                local(average).copy_(before)
    return are_averaged


def drop_averages(optimizer: Optimizer) -> None:
    """Free the averages."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
