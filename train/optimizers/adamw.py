"""AdamW."""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from train.optimizers.optimizer import Beta, Groups
from train.optimizers.parameterwise import ParameterWise, ParameterWiseSettings, State, zeros


class AdamSettings(ParameterWiseSettings):
    """What the relatives of Adam have in common."""

    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)


class RoundedAdamW(ParameterWise):
    """AdamW with moments in FP32 for weights of any precision."""

    sharded = True

    def start(self, parameter: Tensor, group: State) -> State:
        return {"exp_avg": zeros(parameter), "exp_avg_sq": zeros(parameter)}

    def update(self, weight: Tensor, grad: Tensor, state: State, group: State) -> None:
        adamw(weight, grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group)


class AdamW(AdamSettings):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101): torch's own.

    implementation: fused is one kernel; foreach is as fast where there is none, and holds one more copy of all
    parameters while it steps; loop steps one parameter after the other. stochastic_rounding: for weights in BF16, with
    moments in FP32; weights in FP32 are not rounded, and are stepped as by `loop`.
    """

    exact: ClassVar[bool] = True
    dtensor: ClassVar[bool] = True
    method: ClassVar[type[ParameterWise]] = RoundedAdamW
    smaller: ClassVar[str | None] = "adamw-8bit"

    implementation: Literal["fused", "foreach", "loop"] = "fused"

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        settings = self.model_dump(include={"lr", "weight_decay", "betas", "eps"})
        if self.stochastic_rounding:
            return self.method(groups, settings, stochastic_rounding=True)
        # The fused kernel refuses tensors without values.
        values = not any(parameter.is_meta for group in groups for parameter in group["params"])
        fused = self.implementation == "fused" and values
        return torch.optim.AdamW(groups, **settings, fused=fused, foreach=self.implementation == "foreach")


def moments(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, group: State) -> Tensor:
    """Move both moments in place, and return Adam's update, corrected for their start at zero: [as the gradient]."""
    beta1, beta2 = group["betas"]
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    deviation = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    return torch.div(exp_avg, deviation, out=deviation).div_(1 - beta1**step)


def adamw(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, group: State) -> None:
    """Take one step of AdamW in place, all tensors float32 and of one shape."""
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_(moments(grad, exp_avg, exp_avg_sq, step, group), alpha=group["lr"])
