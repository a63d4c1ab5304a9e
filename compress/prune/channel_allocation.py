"""The importance of the channels of a group, and how many each group keeps when the least sensitive give up most."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.criteria.criterion import Criterion, LayerStatistics, collect_statistics
from compress.prune.channel_groups import NORMS, TRANSPOSED, ChannelGroup, get_layer
from compress.prune.channel_surgery import collect_removed, mask_channels
from laconic.data.dataset import Dataset
from laconic.errors import UsageError
from laconic.models.hooks import forward_hooks
from laconic.models.signature import call
from laconic.tasks.task import Task

ChannelScores = dict[tuple[str, bool], Tensor]
"""The scores of a layer's channels, by its path and whether they are its input channels."""

LEVELS = 4
"""Numbers of channels of a group that are measured, below all of them."""


def measure_importance(
    criterion: Criterion, module: nn.Module, task: Task, dataset: Dataset, groups: Sequence[ChannelGroup], seed: int
) -> list[Tensor]:
    """Return for each group the importance of its channels, [width] float64, with a mean of 1.

    Each layer's scores are scaled to a mean of 1 before they are averaged, so that layers of different sizes have the
    same weight. Raises UsageError if the criterion can score none of a group's layers.
    """
    paths = list(dict.fromkeys(member.path for group in groups for member in group.members))
    layers = {path: get_layer(module, path) for path in paths}
    known = (nn.Linear, nn.Conv2d) if criterion.needs else (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    readable = [path for path, layer in layers.items() if isinstance(layer, known)]
    scores: ChannelScores = {}
    for path, statistics in collect_statistics(criterion, module, task, dataset, readable, seed=seed).items():
        score, layer = criterion.score(statistics).double(), layers[path]
        scores[path, False], scores[path, True] = score.sum(dim=1), sum_input_scores(score, layer)
    for path, layer in layers.items():
        if isinstance(layer, TRANSPOSED) and not criterion.needs:  # [in, out / groups, ...]
            score = criterion.score(LayerStatistics(layer.weight.detach().flatten(1))).double()
            inputs, outputs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
            score = score.reshape(layer.groups, inputs, outputs, -1)
            scores[path, False], scores[path, True] = score.sum(dim=(1, 3)).flatten(), score.sum(dim=(2, 3)).flatten()
        if isinstance(layer, NORMS) and layer.affine and not criterion.needs:
            scores[path, False] = criterion.score(LayerStatistics(layer.weight.detach()[:, None]))[:, 0].double()
    return [group_importance(group, scores) for group in groups]


def sum_input_scores(scores: Tensor, layer: nn.Module | nn.Parameter) -> Tensor:
    """Return the scores of a layer's input channels, [in]: each the sum over all weights that it is multiplied with."""
    weight, groups = getattr(layer, "weight", layer), getattr(layer, "groups", 1)
    assert isinstance(weight, Tensor)
    summed = scores.reshape(groups, -1, scores.shape[1]).sum(dim=1)
    return summed.reshape(groups, weight.shape[1], -1).sum(dim=2).flatten()


def group_importance(group: ChannelGroup, scores: ChannelScores) -> Tensor:
    """Return the importance of one group's channels, [width] float64."""
    parts = []
    for member in group.members:
        channels = scores.get((member.path, member.axis == "in"))
        if channels is not None:
            summed = torch.stack([channels[list(places)].sum() for places in member.places])
            parts.append(summed / summed.mean().clamp(min=1e-30))
    if not parts:
        raise UsageError(
            f"the criterion needs the inputs of linear layers or two-dimensional convolutions, and none of them shares "
            f"the channels of {group.name}. Use criterion: magnitude"
        )
    return torch.stack(parts).mean(dim=0)


@dataclass(frozen=True)
class RankedGroup:
    """A group with its channels in descending order of importance. step: the number that stays is a multiple of it."""

    group: ChannelGroup
    order: Sequence[int]
    step: int

    def levels(self) -> list[int]:
        """Return the numbers of channels that are measured, all of them first."""
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
    """Return how many channels each group keeps: as many multiplications as with `uniform`, at the lowest loss of
    fidelity.

    The sensitivity of the output to each group is measured with that group alone masked, at a few levels, one pass over
    the samples each. Then one group after the other goes down a level: the one that loses least per multiplication.
    """
    positions = count_positions(module, batch)
    budget = count_multiplications(module, positions, ranked, uniform)
    levels = [group.levels() for group in ranked]
    whole = fidelity(module)
    losses = [
        [max(0.0, whole - measure_masked(module, group, count, fidelity)) for count in counts]
        for group, counts in zip(ranked, levels, strict=True)
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
    """Return the fidelity with all but the `count` most important channels of a group masked."""
    masked = copy.deepcopy(module)
    mask_channels(masked, collect_removed([(ranked.group, ranked.order[count:])]))
    return fidelity(masked)


def count_positions(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how many output positions each layer computes for a sample, by its path: how often its weight is used."""
    positions: dict[str, int] = {}
    rows = len(next(iter(batch.values())))

    def count(path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        channels = output.shape[-1] if isinstance(layer, nn.Linear) else output.shape[1]
        positions[path] = positions.get(path, 0) + output.numel() // channels // rows

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    paths = [path for path, layer in module.named_modules() if isinstance(layer, kinds)]
    with torch.no_grad(), forward_hooks(module, paths, after=count):
        call(module, batch)
    return positions


def count_multiplications(
    module: nn.Module, positions: Mapping[str, int], ranked: Sequence[RankedGroup], counts: Sequence[int]
) -> float:
    """Count the multiplications for one sample when the groups keep so many channels."""
    removed: dict[tuple[str, str], float] = {}
    for entry, count in zip(ranked, counts, strict=True):
        for member in entry.group.members:
            share = 1 - count / entry.group.width
            count_removed = sum(map(len, member.places)) * share
            removed[member.path, member.axis] = removed.get((member.path, member.axis), 0.0) + count_removed
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
