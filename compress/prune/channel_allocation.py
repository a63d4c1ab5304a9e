"""How many channels each group keeps when the least sensitive groups give up most."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.prune.channel_groups import ChannelGroup
from compress.prune.channel_surgery import collect_removed, mask_channels
from laconic.models.hooks import forward_hooks
from laconic.models.signature import call

LEVELS = 4
"""Numbers of channels of a group that are measured, below all of them."""


@dataclass(frozen=True)
class RankedGroup:
    """A group with its channels in descending order of importance. step: the number that stays is a multiple of it."""

    group: ChannelGroup
    order: Sequence[int]
    step: int

    def levels(self) -> list[int]:
        """The numbers of channels that are measured, all of them first."""
        counts = range((self.group.width - 1) // self.step * self.step, 0, -self.step)
        picked = (
            {counts[round(index * (len(counts) - 1) / max(LEVELS - 1, 1))] for index in range(LEVELS)}
            if counts
            else set()
        )
        return [self.group.width, *sorted(picked, reverse=True)]


def allocate_channels(
    ranked: Sequence[RankedGroup],
    uniform: Sequence[int],
    module: nn.Module,
    batch: Mapping[str, Tensor],
    fidelity: Callable[[nn.Module], float],
) -> list[int]:
    """How many channels each group keeps: as many multiplications as with `uniform`, at the lowest loss of fidelity.

    The sensitivity of the output to each group is measured with that group alone masked, at a few levels, one pass over
    the samples each. Then one group after the other goes down a level: the one that loses least per multiplication.
    """
    positions = count_positions(module, batch)
    budget = count_multiplications(module, positions, ranked, uniform)
    levels = [each.levels() for each in ranked]
    whole = fidelity(module)
    losses = [
        [max(0.0, whole - measure_masked(module, each, count, fidelity)) for count in counts]
        for each, counts in zip(ranked, levels, strict=True)
    ]
    chosen = [0] * len(ranked)

    def counts_at(indices: Sequence[int]) -> list[int]:
        return [level[index] for level, index in zip(levels, indices, strict=True)]

    left = count_multiplications(module, positions, ranked, counts_at(chosen))
    while left > budget:
        best: tuple[float, int, float] | None = None
        for number in range(len(ranked)):
            if chosen[number] + 1 == len(levels[number]):
                continue
            lower = [*chosen[:number], chosen[number] + 1, *chosen[number + 1 :]]
            work = count_multiplications(module, positions, ranked, counts_at(lower))
            price = (losses[number][lower[number]] - losses[number][chosen[number]]) / max(left - work, 1e-9)
            if best is None or price < best[0]:
                best = price, number, work
        if best is None:
            break
        chosen[best[1]] += 1
        left = best[2]
    return counts_at(chosen)


def measure_masked(module: nn.Module, ranked: RankedGroup, count: int, fidelity: Callable[[nn.Module], float]) -> float:
    """The fidelity with all but the `count` most important channels of a group masked."""
    masked = copy.deepcopy(module)
    mask_channels(masked, collect_removed([(ranked.group, ranked.order[count:])]))
    return fidelity(masked)


def count_positions(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, int]:
    """How many output positions each layer computes for a sample, by its path: how often its weight is used."""
    found: dict[str, int] = {}
    rows = len(next(iter(batch.values())))

    def count(path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        channels = output.shape[-1] if isinstance(layer, nn.Linear) else output.shape[1]
        found[path] = found.get(path, 0) + output.numel() // channels // rows

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    paths = [path for path, layer in module.named_modules() if isinstance(layer, kinds)]
    with torch.no_grad(), forward_hooks(module, paths, after=count):
        call(module, batch)
    return found


def count_multiplications(
    module: nn.Module, positions: Mapping[str, int], ranked: Sequence[RankedGroup], counts: Sequence[int]
) -> float:
    """Multiplications for one sample when the groups keep so many channels."""
    removed: dict[tuple[str, str], float] = {}
    for each, count in zip(ranked, counts, strict=True):
        for member in each.group.members:
            share = 1 - count / each.group.width
            own = sum(map(len, member.places)) * share
            removed[member.path, member.axis] = removed.get((member.path, member.axis), 0.0) + own
    total = 0.0
    for path, uses in positions.items():
        layer = module.get_submodule(path)
        weight = layer.weight
        assert isinstance(weight, Tensor)
        out = weight.shape[0]
        into = weight.shape[1] * getattr(layer, "groups", 1)
        rows = 1 - (removed.get((path, "out"), 0.0) + removed.get((path, "both"), 0.0)) / out
        total += uses * weight.numel() * rows * (1 - removed.get((path, "in"), 0.0) / into)
    return total
