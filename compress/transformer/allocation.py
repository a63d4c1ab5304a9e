"""How many units each block keeps when the model keeps a share of them: fewer where the answers suffer less."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.statistics.gram import Moments, matrix, moments
from compress.transformer.anatomy import Site
from compress.transformer.elimination import Elimination, Normal, Sums, bias_of, eliminate, put
from compress.transformer.surgery import columns
from laconic.data.dataset import Dataset
from laconic.tasks.task import Task

Divergence = Callable[[nn.Module], float]
"""How far a model's answers are from the original's, 0 where they are the same."""


@dataclass(frozen=True)
class Curve:
    """harms: what the answers lose when so many units of a block stay, by the count, from 0 to all of them."""

    harms: Sequence[float]

    @property
    def units(self) -> int:
        return len(self.harms) - 1


def allocate(curves: Sequence[Curve], wanted: int, grain: int) -> list[int]:
    """How many units of each block stay: multiples of `grain`, at least one of it, `wanted` together or just below.

    Units are cut `grain` at a time, each time where the answers lose least for each.
    """
    counts = [curve.units for curve in curves]
    while sum(counts) > wanted:
        below = [(count - 1) // grain * grain for count in counts]
        prices = {
            index: (curves[index].harms[less] - curves[index].harms[count]) / (count - less)
            for index, (count, less) in enumerate(zip(counts, below, strict=True))
            if less > 0
        }
        if not prices:
            break
        cheapest = min(prices, key=lambda index: prices[index])
        counts[cheapest] = below[cheapest]
    return counts


def curves(
    module: nn.Module, sites: Sequence[Site], task: Task, dataset: Dataset, divergence: Divergence
) -> list[Curve]:
    """Of each site, when it is cut alone and its other units make up for it.

    How the layer's error grows has a closed form; what the answers lose by it is measured once a site, with half of
    its units cut, and taken to grow with it. The module is as before afterwards.
    """
    seen = moments(module, task, dataset, [site.consumer for site in sites])
    base = divergence(module)
    return [curve(module, site, seen[site.consumer], divergence, base) for site in sites]


def curve(module: nn.Module, site: Site, seen: Moments, divergence: Divergence, base: float) -> Curve:
    """Of one site; base: the divergence without a cut."""
    layer = module.get_submodule(site.consumer)
    weight, own = matrix(layer).detach().clone(), bias_of(layer)
    bias = None if own is None else own.clone()
    normal = Normal(weight, bias is not None, unchanged(weight, bias, seen))
    found = eliminate(normal, site.units)
    half = max(site.units // 2, 1)
    kept = columns(site, found.kept(half))
    fitted, mean = normal.solve(kept)
    try:
        put(layer, torch.zeros_like(weight).index_copy(1, kept, fitted.float()), mean)
        lost = max(divergence(module) - base, 0.0)
    finally:
        put(layer, weight, bias)
    return Curve(harms(found, half, lost, site.units))


def harms(found: Elimination, probe: int, lost: float, units: int) -> list[float]:
    """By the count of units that stay. lost: what was measured when `probe` did."""
    whole = found.error(units)
    scale = lost / max(found.error(probe) - whole, 1e-30)
    return [float("inf"), *(scale * (found.error(count) - whole) for count in range(1, units + 1))]


def unchanged(weight: Tensor, bias: Tensor | None, seen: Moments) -> Sums:
    """What a layer's own outputs are as a target."""
    cross, target = weight @ seen.gram, weight @ seen.total
    energy = float((cross.double() * weight.double()).sum())
    if bias is not None:
        energy += float((bias * (2 * target + seen.count * bias)).double().sum())
        cross, target = cross + torch.outer(bias, seen.total), target + seen.count * bias
    return Sums(seen, cross, target, energy)
