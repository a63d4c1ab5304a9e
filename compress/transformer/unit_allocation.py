"""Which units of a block are eliminated, when the others compensate for it, and how many each block keeps: fewer where
the output is less sensitive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.statistics.layer_weights import get_bias, weight_matrix, write_weight
from compress.statistics.least_squares import NormalEquations, RegressionSums
from compress.statistics.moments import Moments, collect_moments
from compress.transformer.surgery import consumer_columns, unit_indices
from laconic.data.dataset import Dataset
from laconic.models.anatomy import Site
from laconic.tasks.task import Task

RIDGE = 1e-1
"""Ridge penalty while units are eliminated, as a share of the mean of the Gram matrix's diagonal."""
TINY = 1e-300
ROUNDS = 64
"""About so many rounds at most eliminate a layer's units: each removes several at once where there are more units."""

Divergence = Callable[[nn.Module], float]
"""How far a model's outputs are from the original's; 0 where they are the same."""


@dataclass(frozen=True)
class Elimination:
    """The order in which units are eliminated. order: the first to go first. errors: the remaining sum of squares with
    the first n removed and the others compensating, n from 0 to one less than the units."""

    order: tuple[int, ...]
    errors: tuple[float, ...]

    def kept(self, count: int) -> list[int]:
        """Return the units that stay when `count` of them do, in ascending order."""
        return sorted(self.order[len(self.order) - count :])

    def error(self, count: int) -> float:
        """Return the remaining sum of squares when `count` units stay."""
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
    """Return how much the sum of squares grows when a unit is removed and the others compensate, [units]."""
    if width == 1:
        return weight.square().sum(dim=0) / inverse.diagonal().clamp(min=TINY)
    units = len(inverse) // width
    blocks = inverse.view(units, width, units, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    columns = weight.view(len(weight), units, width).permute(1, 2, 0)
    costs: Tensor = (columns * torch.linalg.solve(blocks, columns)).sum(dim=(1, 2))
    return costs


def rank_units(scores: Tensor, units: int) -> tuple[int, ...]:
    """Return the units in ascending order of importance. scores: of the consumer's weights, [out, in]."""
    return tuple(scores.sum(dim=0).view(units, -1).sum(dim=1).argsort(stable=True).tolist())


@dataclass(frozen=True)
class SensitivityCurve:
    """The sensitivity of the output to pruning one block. losses: by the number of units kept, from 0 to all."""

    losses: Sequence[float]

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.losses) - 1


def allocate_units(curves: Sequence[SensitivityCurve], total: int, multiple: int) -> list[int]:
    """Return how many units each block keeps: positive multiples of `multiple` that add up to `total` or just below.

    Greedy: `multiple` units at a time are removed where the loss per unit is lowest.
    """
    counts = [curve.units for curve in curves]
    while sum(counts) > total:
        below = [(count - 1) // multiple * multiple for count in counts]
        prices = {
            index: (curves[index].losses[less] - curves[index].losses[count]) / (count - less)
            for index, (count, less) in enumerate(zip(counts, below, strict=True))
            if less > 0
        }
        if not prices:
            break
        cheapest = min(prices, key=lambda index: prices[index])
        counts[cheapest] = below[cheapest]
    return counts


def measure_curves(
    module: nn.Module, sites: Sequence[Site], task: Task, dataset: Dataset, divergence: Divergence
) -> list[SensitivityCurve]:
    """Return the sensitivity curve of each site, pruned alone, the remaining units compensating for it.

    How the layer's error grows has a closed form. The divergence of the output is measured once a site, with half of
    its units removed, and assumed proportional to that error. The module is unchanged afterwards.
    """
    moments = collect_moments(module, task, dataset, [site.consumer for site in sites])
    base = divergence(module)
    return [measure_curve(module, site, moments[site.consumer], divergence, base) for site in sites]


def measure_curve(
    module: nn.Module, site: Site, moments: Moments, divergence: Divergence, base: float
) -> SensitivityCurve:
    """Return the sensitivity curve of one site. base: the divergence without pruning."""
    layer = module.get_submodule(site.consumer)
    weight, present = weight_matrix(layer).detach().clone(), get_bias(layer)
    bias = None if present is None else present.clone()
    equations = NormalEquations(weight, bias is not None, own_output_sums(weight, bias, moments), RIDGE)
    elimination = eliminate_units(equations, site.units)
    half = max(site.units // 2, 1)
    kept = consumer_columns(site, elimination.kept(half))
    fitted, mean = equations.solve(kept)
    try:
        write_weight(layer, torch.zeros_like(weight).index_copy(1, kept, fitted.float()), mean)
        loss = max(divergence(module) - base, 0.0)
    finally:
        write_weight(layer, weight, bias)
    return SensitivityCurve(scale_errors(elimination, half, loss, site.units))


def scale_errors(elimination: Elimination, probe: int, loss: float, units: int) -> list[float]:
    """Return the layer's errors by the number of units kept, scaled to the loss measured with `probe` units kept."""
    whole = elimination.error(units)
    scale = loss / max(elimination.error(probe) - whole, 1e-30)
    return [float("inf"), *(scale * (elimination.error(count) - whole) for count in range(1, units + 1))]


def own_output_sums(weight: Tensor, bias: Tensor | None, moments: Moments) -> RegressionSums:
    """Return the regression sums whose targets are the layer's own outputs."""
    cross, target = weight @ moments.gram, weight @ moments.total
    energy = float((cross.double() * weight.double()).sum())
    if bias is not None:
        energy += float((bias * (2 * target + moments.count * bias)).double().sum())
        cross, target = cross + torch.outer(bias, moments.total), target + moments.count * bias
    return RegressionSums(moments, cross, target, energy)
