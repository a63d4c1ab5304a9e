"""Which units of a layer's input to cut, and what weights the others then need: least squares on calibration data.

The layer's output is to stay as it is, or to become what the original's was where the cuts before it have moved it.
Both have a closed form in the second moments of the inputs and of what the output should be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.gram import Moments, matrix

DAMPING = 1e-3
"""Of the mean of the moments' diagonal: how strongly the weights are held where they were."""
ROUNDS = 512
"""Units that are cut between two updates of what is left are so many that a layer takes at most this many updates."""


@dataclass
class Fit:
    """Sums over tokens, from which a layer's weights are found. inputs: the layer's inputs x. cross: of t xT, [out, in]
    float32, where t is what should come out. target: of t, [out]. energy: of the squares of t, [out]."""

    inputs: Moments
    cross: Tensor
    target: Tensor
    energy: Tensor

    @classmethod
    def empty(cls, into: int, out: int) -> "Fit":
        """Nothing seen yet."""
        moments = Moments(torch.zeros(into, into), torch.zeros(into), 0)
        return cls(moments, torch.zeros(out, into), torch.zeros(out), torch.zeros(out))

    def add(self, x: Tensor, target: Tensor) -> None:
        """Count tokens: x [tokens, in], target [tokens, out]."""
        self.inputs.gram.addmm_(x.T, x)
        self.inputs.total += x.sum(dim=0)
        self.inputs.count += len(x)
        self.cross.addmm_(target.T, x)
        self.target += target.sum(dim=0)
        self.energy += target.square().sum(dim=0)


class Normal:
    """The normal equations of one layer, centred where it has a bias to take the means; float64.

    Their solution minimises |t - W x - b|^2 + damping |W - W0|^2, with W0 the weights as they are.
    """

    def __init__(self, layer: nn.Module, fit: Fit, damping: float = DAMPING) -> None:
        self.weight = matrix(layer).detach().double()
        gram, cross = fit.inputs.gram.double(), fit.cross.double()
        count = max(fit.inputs.count, 1)
        self.mean, self.centre = fit.inputs.total.double() / count, fit.target.double() / count
        self.energy = float(fit.energy.double().sum())
        self.biased = layer.bias is not None
        if self.biased:
            gram = gram - count * torch.outer(self.mean, self.mean)
            cross = cross - count * torch.outer(self.centre, self.mean)
            self.energy -= float(count * self.centre.square().sum())
        held = damping * float(gram.diagonal().mean()) + 1e-12
        self.hessian = gram + held * torch.eye(len(gram), dtype=gram.dtype)
        self.cross = cross + held * self.weight
        self.energy += held * float(self.weight.square().sum())

    def solve(self, kept: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights of these columns, [out, kept], and the bias, [out], that do best without the others; float32."""
        root = torch.linalg.cholesky(self.hessian[kept][:, kept])
        weight = torch.cholesky_solve(self.cross[:, kept].T, root).T
        bias = self.centre - weight @ self.mean[kept] if self.biased else None
        return weight.float(), None if bias is None else bias.float()

    def error(self, kept: Tensor) -> float:
        """What these columns leave of the sum of squares, after `solve`."""
        root = torch.linalg.cholesky(self.hessian[kept][:, kept])
        half = torch.linalg.solve_triangular(root, self.cross[:, kept].T, upper=False)
        return max(self.energy - float(half.square().sum()), 0.0)


@dataclass(frozen=True)
class Elimination:
    """order: the units, those to be cut first in front. errors: what is left of the sum of squares when the first n are
    cut and the others make up for it, n from 0 to one less than the units."""

    order: tuple[int, ...]
    errors: tuple[float, ...]

    def kept(self, count: int) -> list[int]:
        """The units that stay when so many do, in their order."""
        return sorted(self.order[len(self.order) - count :])

    def error(self, count: int) -> float:
        """When so many stay."""
        return self.errors[len(self.order) - count]


def eliminate(normal: Normal, units: int, *, protected: int = 1) -> Elimination:
    """Cut units one after another, each time those that the others can stand in for best, down to `protected`.

    The optimal brain surgeon for groups of weights (Hassibi and Stork 1993; Kurtic et al., ZipLM, 2023): to cut unit b
    costs tr(W_b ([H^-1]_bb)^-1 W_bT), and changes the other weights and H^-1 in closed form.
    """
    width = len(normal.hessian) // units
    inverse = torch.linalg.inv(normal.hessian)
    weight = normal.cross @ inverse
    error = max(normal.energy - float((weight * normal.cross).sum()), 0.0)
    alive = torch.ones(units, dtype=torch.bool)
    order: list[int] = []
    errors = [error]
    stride = max(1, units // ROUNDS)
    while int(alive.sum()) > protected:
        costs = unit_costs(weight, inverse, units, width)
        costs[~alive] = torch.inf
        count = min(stride, int(alive.sum()) - protected)
        chosen = costs.argsort(stable=True)[:count]
        places = (chosen[:, None] * width + torch.arange(width)).flatten()
        block = inverse[places][:, places]
        solved = torch.linalg.solve(block, inverse[places])
        before = weight[:, places]
        total = float((before @ torch.linalg.solve(block, before.T)).trace())
        shares = costs[chosen] / costs[chosen].sum().clamp(min=1e-300) * total
        for share in shares.tolist():
            error += max(share, 0.0)
            errors.append(error)
        weight -= before @ solved
        inverse -= inverse[:, places] @ solved
        weight[:, places] = 0
        inverse[places] = 0
        inverse[:, places] = 0
        alive[chosen] = False
        order += chosen.tolist()
    order += [unit for unit in range(units) if alive[unit]]
    return Elimination(tuple(order), tuple(errors))


def unit_costs(weight: Tensor, inverse: Tensor, units: int, width: int) -> Tensor:
    """What the sum of squares grows by when a unit is cut and the others make up for it, [units]."""
    if width == 1:
        return weight.square().sum(dim=0) / inverse.diagonal().clamp(min=1e-300)
    blocks = inverse.view(units, width, units, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    columns = weight.view(len(weight), units, width).permute(1, 2, 0)
    # What was cut before is all zeros, and the unit matrix keeps it solvable.
    empty = blocks.diagonal(dim1=1, dim2=2).sum(dim=1) == 0
    blocks = blocks + empty[:, None, None] * torch.eye(width, dtype=blocks.dtype)
    return (columns * torch.linalg.solve(blocks, columns)).sum(dim=(1, 2))


def by_score(scores: Tensor, units: int) -> tuple[int, ...]:
    """The units, those of the lowest score first. scores: [out, in], of the consumer's weights."""
    return tuple(scores.sum(dim=0).view(units, -1).sum(dim=1).argsort(stable=True).tolist())


def put(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Give a layer other weights, [out, in], in place."""
    matrix(layer).detach().copy_(weight)
    if bias is not None:
        layer.bias.detach().copy_(bias)  # type: ignore[operator, union-attr]


def kept_of(elimination: Sequence[int], count: int) -> list[int]:
    """The units that stay when so many do, in their order."""
    return sorted(elimination[len(elimination) - count :])
