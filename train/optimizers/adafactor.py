"""Adafactor: the second moment of a matrix from its rows and its columns."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from train.optimizers.parameterwise import ParameterWise, ParameterWiseSettings, State


class Factored(ParameterWise):
    """Adafactor's step, moments in FP32."""

    def start(self, parameter: Tensor, group: State) -> State:
        def zeros(shape: torch.Size) -> Tensor:
            return torch.zeros(shape, device=parameter.device)

        if parameter.ndim < 2:
            return {"exp_avg_sq": zeros(parameter.shape)}
        rows, columns = parameter.flatten(1).shape
        return {"row": zeros(torch.Size([rows])), "column": zeros(torch.Size([columns]))}

    def update(self, weight: Tensor, grad: Tensor, state: State, group: State) -> None:
        share = state["step"] ** group["decay"]
        square = grad.square().add_(group["eps"])
        if "row" in state:
            row, column = state["row"], state["column"]
            matrix = square.flatten(1)
            row.lerp_(matrix.mean(dim=1), share)
            column.lerp_(matrix.mean(dim=0), share)
            inverse = torch.outer((row / row.mean()).rsqrt_(), column.rsqrt())
            change = inverse.view(grad.shape).mul_(grad)
        else:
            change = state["exp_avg_sq"].lerp_(square, share).rsqrt().mul_(grad)
        change.div_((change.norm() / change.numel() ** 0.5 / group["clip"]).clamp_(min=1.0))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(change, alpha=group["lr"])


class Adafactor(ParameterWiseSettings):
    """Next to no state (Shazeer and Stern, arXiv 1804.04235), without momentum, at the learning rate that is given.

    decay: of the second moment, 1 - step^decay. clip: the largest root mean square of an update before `lr`.
    A convolution is a matrix of [out, in x height x width].
    """

    method: ClassVar[type[ParameterWise]] = Factored

    decay: float = Field(default=-0.8, lt=0)
    clip: float = Field(default=1.0, gt=0)
    eps: float = Field(default=1e-30, gt=0)
