"""APOLLO: Adam's scaling of each channel, estimated in a few random directions."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from train.optimizers.adamw import AdamSettings, adamw, moments
from train.optimizers.parameterwise import ParameterWise, State, derive_seed, make_generator

DIRECTIONS = 1
"""Tells the random numbers of directions from those of rounding."""


class ProjectedAdam(ParameterWise):
    """APOLLO's step, moments in FP32."""

    def start(self, parameter: Tensor, group: State) -> State:
        whole = parameter.ndim < 2 or min(parameter.flatten(1).shape) <= group["rank"]
        shape = parameter.shape if whole else (group["rank"], max(parameter.flatten(1).shape))
        kept = {name: torch.zeros(shape, device=parameter.device) for name in ("exp_avg", "exp_avg_sq")}
        return kept if whole else kept | {"norm": torch.zeros((), device=parameter.device)}

    def update(self, weight: Tensor, grad: Tensor, state: State, group: State) -> None:
        if "norm" not in state:
            adamw(weight, grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group)
            return
        rank, matrix = group["rank"], grad.flatten(1)
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        period = (state["step"] - 1) // group["interval"]
        directions = torch.randn(
            rank,
            wide.shape[0],
            device=grad.device,
            generator=make_generator(derive_seed(state["seed"], DIRECTIONS, period), grad),
        ).div_(rank**0.5)
        low = directions @ wide
        scaled = moments(low, state["exp_avg"], state["exp_avg_sq"], state["step"], group)
        factor = scaled.norm(dim=0).div_(low.norm(dim=0).add_(1e-8)).mul_(group["scale"])
        change = wide * factor
        norm, before = change.norm(), state["norm"]
        limit = torch.where(before > 0, before * group["growth"], norm)
        state["norm"].copy_(torch.minimum(norm, limit))
        change.mul_((limit / (norm + 1e-8)).clamp_(max=1.0))
        change = change if wide is matrix else change.T
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(change.reshape(weight.shape), alpha=group["lr"])


class Apollo(AdamSettings):
    """Gradient descent with Adam's learning rate of each channel (Zhu et al., arXiv 2412.05270).

    The moments are those of the gradient projected to `rank` random directions, drawn anew from the seed every
    `interval` steps and never kept: 8 x rank bytes per channel, where a channel is a column or a row, along the longer
    axis. The norm of an update grows by at most `growth` a step. Tensors with fewer axes than two, or with an axis
    that is no longer than the rank, are stepped by AdamW.

    rank: 1 with scale 128^0.5 and one scaling per tensor is APOLLO-Mini; here every rank scales by channel.
    """

    method: ClassVar[type[ParameterWise]] = ProjectedAdam

    eps: float = Field(default=1e-6, gt=0)
    rank: int = Field(default=256, gt=0)
    interval: int = Field(default=200, gt=0)
    scale: float = Field(default=1.0, gt=0)
    growth: float = Field(default=1.01, gt=1)
