"""Stochastic gradient descent."""

from typing import ClassVar

import torch
from pydantic import Field

from train.optimizers.optimizer import Groups, Optimizer


class Sgd(Optimizer):
    """Gradient descent, with or without momentum (Sutskever et al., 2013): no state, or one value per parameter."""

    exact: ClassVar[bool] = True
    dtensor: ClassVar[bool] = True

    lr: float = Field(default=1e-2, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False

    def build(self, groups: Groups) -> torch.optim.SGD:
        return torch.optim.SGD(
            groups,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            foreach=False,  # no copy of all gradients; the fused kernel does not know sharded weights
        )
