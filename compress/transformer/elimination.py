"""Backward elimination of units: which columns of a layer to remove when the others compensate for it.

The optimal brain surgeon for groups of weights, on the normal equations of the layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.statistics.least_squares import NormalEquations
from compress.transformer.surgery import unit_indices

RIDGE = 1e-1
"""Ridge penalty while units are eliminated, as a share of the mean of the Gram matrix's diagonal."""
TINY = 1e-300
ROUNDS = 64
"""About so many rounds at most eliminate a layer's units: each removes several at once where there are more units."""


@dataclass(frozen=True)
class Elimination:
    """The order in which units are eliminated. order: the first to go first. errors: the remaining sum of squares with
    the first n removed and the others compensating, n from 0 to one less than the units."""

    order: tuple[int, ...]
    errors: tuple[float, ...]

    def kept(self, count: int) -> list[int]:
        """The units that stay when `count` of them do, in ascending order."""
        return sorted(self.order[len(self.order) - count :])

    def error(self, count: int) -> float:
        """The remaining sum of squares when `count` units stay."""
        return self.errors[len(self.order) - count]


def eliminate_units(equations: NormalEquations, units: int, *, protected: int = 1) -> Elimination:
    """Eliminate units until `protected` are left, each time those whose removal the others compensate best.

    Optimal brain surgeon for groups of weights (Hassibi & Stork, 1993; Kurtic et al., ZipLM, 2023): removing unit b
    costs tr(W_b ([H^-1]_bb)^-1 W_bT), and changes the other weights and H^-1 in closed form.
    """
    width = len(equations.hessian) // units
    inverse = torch.linalg.inv(equations.hessian)
    weight = equations.cross @ inverse
    error = max(equations.energy - float((weight * equations.cross).sum()), 0.0)
    alive = torch.arange(units)
    order: list[int] = []
    errors = [error]
    stride = max(1, units // ROUNDS)
    while len(alive) > protected:
        costs = removal_costs(weight, inverse, width)
        chosen, left = costs.argsort(stable=True).split_with_sizes(
            (gone := min(stride, len(alive) - protected), len(alive) - gone)
        )
        left = left.sort().values
        out, stay = unit_indices(chosen, width), unit_indices(left, width)
        into = inverse[out]
        block = into[:, out]
        removed = weight[:, out]
        # The units of one round are removed together; the joint cost is shared out in proportion to their own costs.
        total = float((removed * torch.linalg.solve(block, removed.T).T).sum())
        for share in (costs[chosen] / costs[chosen].sum().clamp(min=TINY)).tolist():
            error += max(share * total, 0.0)
            errors.append(error)
        solved = torch.linalg.solve(block, into[:, stay])
        weight = weight[:, stay] - removed @ solved
        inverse = inverse[stay][:, stay].addmm_(into[:, stay].T, solved, alpha=-1)
        order += alive[chosen].tolist()
        alive = alive[left]
    return Elimination((*order, *alive.tolist()), tuple(errors))


def removal_costs(weight: Tensor, inverse: Tensor, width: int) -> Tensor:
    """How much the sum of squares grows when a unit is removed and the others compensate, [units]."""
    if width == 1:
        return weight.square().sum(dim=0) / inverse.diagonal().clamp(min=TINY)
    units = len(inverse) // width
    blocks = inverse.view(units, width, units, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    columns = weight.view(len(weight), units, width).permute(1, 2, 0)
    costs: Tensor = (columns * torch.linalg.solve(blocks, columns)).sum(dim=(1, 2))
    return costs


def rank_units(scores: Tensor, units: int) -> tuple[int, ...]:
    """The units in ascending order of importance. scores: of the consumer's weights, [out, in]."""
    return tuple(scores.sum(dim=0).view(units, -1).sum(dim=1).argsort(stable=True).tolist())
