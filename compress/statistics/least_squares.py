"""Ridge regression of layers on calibration data: layers refitted so that they give the outputs of their originals."""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.statistics.layer_inputs import ROWS, forward_batches, iterate_inputs
from compress.statistics.layer_weights import get_bias, weight_matrix, write_weight
from compress.statistics.moments import Moments
from laconic.data.dataset import Dataset
from laconic.tasks.task import Task

RIDGE = 1e-3
"""Ridge penalty of `refit_layers`, as a share of the mean square of an input. On digits, channels halved and 60
samples: 1e-4 and 1e-2 are within half a point."""

RIDGES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Ridge penalties that `refit_cross_validated` chooses from."""

SAMPLES, INPUTS_PER_WEIGHT = 64, 32
"""`refit_layers` stops reading data after so many samples, if these gave so many inputs for each weight of an output:
an image has many patches."""


@dataclass
class RegressionSums:
    """Sums over the inputs x and the targets t of a layer's outputs, from which its weight is fitted.

    inputs: moments of x. cross: the sum of t xT, [out, in] float32. target: the sum of t, [out]. energy: the sum of all
    squares of t, which only errors need.
    """

    inputs: Moments
    cross: Tensor
    target: Tensor
    energy: float = 0.0

    @classmethod
    def zeros(cls, layer: nn.Module, targets: int | None = None) -> "RegressionSums":
        """Make the sums of no samples of a layer's inputs and so many targets; default: the layer's outputs."""
        weight = weight_matrix(layer).detach().float()
        out, into = weight.shape
        count = out if targets is None else targets
        return cls(Moments.zeros(weight, into), weight.new_zeros(count, into), weight.new_zeros(count))

    def add(self, x: Tensor, target: Tensor) -> None:
        """Count samples: x [count, in], target [count, out]."""
        self.inputs.add(x)
        self.cross.addmm_(target.T, x)
        self.target += target.sum(dim=0)
        self.energy += float(target.double().square().sum())

    def __add__(self, other: "RegressionSums") -> "RegressionSums":
        return RegressionSums(
            self.inputs + other.inputs,
            self.cross + other.cross,
            self.target + other.target,
            self.energy + other.energy,
        )


class NormalEquations:
    """The normal equations of one layer in float64; centred if the layer has a bias, which then absorbs the means.

    Their solution minimises |t - W x - b|^2 + ridge |W - W0|^2, W0 being the present weight. ridge: as a share of the
    mean of the Gram matrix's diagonal.
    """

    def __init__(self, weight: Tensor, biased: bool, sums: RegressionSums, ridge: float) -> None:
        self.weight, self.biased = weight.detach().double(), biased
        count = max(sums.inputs.count, 1)
        self.mean, self.centre = sums.inputs.total.double() / count, sums.target.double() / count
        gram, cross, self.energy = sums.inputs.gram.double(), sums.cross.double(), sums.energy
        if biased:
            gram = sums.inputs.centred()
            cross = cross - count * torch.outer(self.centre, self.mean)
            self.energy -= float(count * self.centre.square().sum())
        penalty = ridge * float(gram.diagonal().mean()) + 1e-12
        self.hessian = gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        self.cross = cross + penalty * self.weight
        self.energy += penalty * float(self.weight.square().sum())

    def is_definite(self, columns: Tensor) -> bool:
        """Whether the equations of these columns are positive definite: float32 sums of few samples may not be."""
        return not int(torch.linalg.cholesky_ex(self.hessian[columns][:, columns]).info)

    def solve(self, columns: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the best weight of these columns (default: all), [out, columns], and the best bias, [out]; float64."""
        chosen = torch.arange(len(self.hessian), device=self.hessian.device) if columns is None else columns
        hessian, cross = self.hessian[chosen][:, chosen], self.cross[:, chosen].T
        root, failed = torch.linalg.cholesky_ex(hessian)
        weight = (torch.linalg.solve(hessian, cross) if int(failed) else torch.cholesky_solve(cross, root)).T
        return weight, self.centre - weight @ self.mean[chosen] if self.biased else None

    def error(self, weight: Tensor, columns: Tensor) -> float:
        """Return the remaining sum of squares with this weight of these columns, [out, columns], and its best bias."""
        explained = 2 * float((weight * self.cross[:, columns]).sum())
        return self.energy - explained + float(((weight @ self.hessian[columns][:, columns]) * weight).sum())


def refit_cross_validated(
    weight: Tensor, biased: bool, halves: tuple[RegressionSums, RegressionSums], columns: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the weight of these columns and the bias, as `NormalEquations.solve` gives them, with the ridge penalty
    that has the lowest error on the half of the samples that it was not fitted on."""
    plain = [NormalEquations(weight, biased, half, 0.0) for half in halves]
    errors = {}
    for ridge in RIDGES:
        damped = [NormalEquations(weight, biased, half, ridge) for half in halves]
        if ridge == max(RIDGES) or all(equations.is_definite(columns) for equations in damped):
            errors[ridge] = sum(
                test.error(fitted.solve(columns)[0], columns)
                for fitted, test in zip(damped, reversed(plain), strict=True)
            )
    best = min(errors, key=lambda ridge: errors[ridge])
    return NormalEquations(weight, biased, halves[0] + halves[1], best).solve(columns)


def is_refittable(layer: nn.Module) -> bool:
    """Whether `refit_layers` can fit a layer: linear, or a convolution in one group."""
    return isinstance(layer, (nn.Linear, Conv1D)) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)


@torch.no_grad()
def refit_layers(
    module: nn.Module,
    original: nn.Module,
    task: Task,
    dataset: Dataset,
    paths: Mapping[str, str],
    rows: Mapping[str, Tensor] | None = None,
) -> None:
    """Fit the layers at these paths, in place, one after the other in this order, by ridge regression.

    paths: of the layers, each with the path of the original's layer whose outputs are the target, computed from the
    original's own activations, so that errors of earlier layers are compensated as well. rows: the original's outputs
    that a layer still has, if not all. Costs two passes over the data, or over a part of it, for each layer.
    """
    for path, target in paths.items():
        layer, kept = module.get_submodule(path), None if rows is None else rows.get(path)
        sums = collect_sums(module, original, task, dataset, path, target, kept)
        if sums.inputs.count:
            equations = NormalEquations(weight_matrix(layer), get_bias(layer) is not None, sums, RIDGE)
            write_weight(layer, *equations.solve())


def collect_sums(
    module: nn.Module, original: nn.Module, task: Task, dataset: Dataset, path: str, target: str, rows: Tensor | None
) -> RegressionSums:
    """Return the sums of a layer's inputs and of the outputs of the original's layer at `target` (of these rows, if
    given)."""
    layer = original.get_submodule(target)
    weight, bias = weight_matrix(layer).detach().double(), get_bias(layer)
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    # The original's inputs are summed first, and mapped to its outputs at the end in float64: with outputs summed in
    # float32 the rounding error of the fitted weights was up to five times as large.
    sums = RegressionSums.zeros(module.get_submodule(path), weight.shape[1])
    with (
        closing(iterate(module, task, dataset, path)) as now,
        closing(iterate(original, task, dataset, target)) as then,
    ):
        for number, (x, before) in enumerate(zip(now, then, strict=True), 1):
            sums.add(x, before)
            if number * ROWS >= SAMPLES and sums.inputs.count >= INPUTS_PER_WEIGHT * x.shape[1]:
                break
    cross, outputs = weight @ sums.cross.double(), weight @ sums.target.double()
    if bias is not None:
        bias = bias.detach().double()
        cross, outputs = cross + torch.outer(bias, sums.inputs.total.double()), outputs + sums.inputs.count * bias
    return RegressionSums(sums.inputs, cross, outputs)


def iterate(module: nn.Module, task: Task, dataset: Dataset, path: str) -> Generator[Tensor, None, None]:
    """Yield the inputs of one layer, [count, in] float32, batch by batch."""
    for _, x in iterate_inputs(module, forward_batches(task, dataset), [path]):
        yield x
