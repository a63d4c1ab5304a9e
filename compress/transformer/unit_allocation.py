"""How many units each block keeps when the model keeps a share of them: fewer where the output is less sensitive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.statistics.layer_weights import get_bias, weight_matrix, write_weight
from compress.statistics.least_squares import NormalEquations, RegressionSums
from compress.statistics.moments import Moments, collect_moments
from compress.transformer.anatomy import Site
from compress.transformer.elimination import RIDGE, Elimination, eliminate_units
from compress.transformer.surgery import consumer_columns
from laconic.data.dataset import Dataset
from laconic.tasks.task import Task

Divergence = Callable[[nn.Module], float]
"""How far a model's outputs are from the original's; 0 where they are the same."""


@dataclass(frozen=True)
class SensitivityCurve:
    """The sensitivity of the output to pruning one block. losses: by the number of units kept, from 0 to all."""

    losses: Sequence[float]

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.losses) - 1


def allocate_units(curves: Sequence[SensitivityCurve], wanted: int, multiple: int) -> list[int]:
    """How many units each block keeps: positive multiples of `multiple` that add up to `wanted` or just below.

    Greedy: `multiple` units at a time are removed where the loss per unit is lowest.
    """
    counts = [curve.units for curve in curves]
    while sum(counts) > wanted:
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
    """The sensitivity curve of each site, pruned alone, the remaining units compensating for it.

    How the layer's error grows has a closed form. The divergence of the output is measured once a site, with half of
    its units removed, and assumed proportional to that error. The module is unchanged afterwards.
    """
    moments = collect_moments(module, task, dataset, [site.consumer for site in sites])
    base = divergence(module)
    return [measure_curve(module, site, moments[site.consumer], divergence, base) for site in sites]


def measure_curve(
    module: nn.Module, site: Site, moments: Moments, divergence: Divergence, base: float
) -> SensitivityCurve:
    """The sensitivity curve of one site. base: the divergence without pruning."""
    layer = module.get_submodule(site.consumer)
    weight, own = weight_matrix(layer).detach().clone(), get_bias(layer)
    bias = None if own is None else own.clone()
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
    """The layer's errors by the number of units kept, scaled to the loss measured with `probe` units kept."""
    whole = elimination.error(units)
    scale = loss / max(elimination.error(probe) - whole, 1e-30)
    return [float("inf"), *(scale * (elimination.error(count) - whole) for count in range(1, units + 1))]


def own_output_sums(weight: Tensor, bias: Tensor | None, moments: Moments) -> RegressionSums:
    """The regression sums whose targets are the layer's own outputs."""
    cross, target = weight @ moments.gram, weight @ moments.total
    energy = float((cross.double() * weight.double()).sum())
    if bias is not None:
        energy += float((bias * (2 * target + moments.count * bias)).double().sum())
        cross, target = cross + torch.outer(bias, moments.total), target + moments.count * bias
    return RegressionSums(moments, cross, target, energy)
