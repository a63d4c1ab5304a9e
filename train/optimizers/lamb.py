"""LAMB: Adam for large batches."""

import torch
from pydantic import Field
from torch import Tensor

from train.optimizers.adamw import moments
from train.optimizers.optimizer import Beta, Groups, Optimizer
from train.optimizers.parameterwise import ParameterWise, State, zeros


class Lamb(Optimizer):
    """Adam's update, scaled in each tensor to the norm of its weights (You et al., arXiv 1904.00962)."""

    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-6, gt=0)
    stochastic_rounding: bool = False

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        settings = {"lr": self.lr, "weight_decay": self.weight_decay, "betas": self.betas, "eps": self.eps}
        return LayerwiseAdam(groups, settings, stochastic_rounding=self.stochastic_rounding)


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
