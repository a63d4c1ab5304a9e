"""LAMB: Adam for large batches."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from train.optimizers.adamw import AdamSettings, moments
from train.optimizers.parameterwise import ParameterWise, State, zeros


class LayerwiseAdam(ParameterWise):
    """LAMB's step, moments in FP32."""

    def start(self, parameter: Tensor, group: State) -> State:
        return {"exp_avg": zeros(parameter), "exp_avg_sq": zeros(parameter)}

    def update(self, weight: Tensor, grad: Tensor, state: State, group: State) -> None:
        change = moments(grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group)
        change.add_(weight, alpha=group["weight_decay"])
        norms = weight.norm(), change.norm()
        ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
        weight.sub_(change.mul_(ratio), alpha=group["lr"])


class Lamb(AdamSettings):
    """Adam's update, scaled in each tensor to the norm of its weights (You et al., arXiv 1904.00962)."""

    method: ClassVar[type[ParameterWise]] = LayerwiseAdam

    eps: float = Field(default=1e-6, gt=0)
