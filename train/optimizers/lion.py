"""Lion: one momentum, and only the sign of the update."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from train.optimizers.optimizer import Beta
from train.optimizers.parameterwise import ParameterWise, ParameterWiseSettings, State


class SignMomentum(ParameterWise):
    """Lion's step."""

    sharded = True

    def start(self, parameter: Tensor, group: State) -> State:
        return {"exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def update(self, weight: Tensor, grad: Tensor, state: State, group: State) -> None:
        (beta1, beta2), momentum = group["betas"], state["exp_avg"].float()
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(momentum.lerp(grad, 1 - beta1).sign_(), alpha=group["lr"])
        momentum.lerp_(grad, 1 - beta2)
        if momentum is not state["exp_avg"]:
            state["exp_avg"].copy_(momentum)


class Lion(ParameterWiseSettings):
    """EvoLved Sign Momentum (Chen et al., arXiv 2302.06675): half of AdamW's state, in the precision of the weights.

    Every weight moves by `lr` at each step, so `lr` should be 3 to 10 times smaller than AdamW's, and `weight_decay`
    as many times larger.
    """

    method: ClassVar[type[ParameterWise]] = SignMomentum
    dtensor: ClassVar[bool] = True

    lr: float = Field(default=1e-4, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.99)
