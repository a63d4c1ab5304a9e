"""The importance of the channels of a group: the scores of all weights that are removed with each channel."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compress.criteria.criterion import Criterion, LayerStatistics, collect_statistics
from compress.prune.channel_groups import NORMS, TRANSPOSED, ChannelGroup, get_layer
from laconic.data.dataset import Dataset
from laconic.errors import UsageError
from laconic.tasks.task import Task

ChannelScores = dict[tuple[str, bool], Tensor]
"""The scores of a layer's channels, by its path and whether they are its input channels."""


def measure_importance(
    criterion: Criterion, module: nn.Module, task: Task, dataset: Dataset, groups: Sequence[ChannelGroup], seed: int
) -> list[Tensor]:
    """For each group the importance of its channels, [width] float64, with a mean of 1.

    Each layer's scores are scaled to a mean of 1 before they are averaged, so that layers of different sizes have the
    same weight. Raises UsageError if the criterion can score none of a group's layers.
    """
    paths = list(dict.fromkeys(member.path for group in groups for member in group.members))
    layers = {path: get_layer(module, path) for path in paths}
    known = (nn.Linear, nn.Conv2d) if criterion.needs else (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    readable = [path for path, layer in layers.items() if isinstance(layer, known)]
    scores: ChannelScores = {}
    for path, statistics in collect_statistics(criterion, module, task, dataset, readable, seed=seed).items():
        own, layer = criterion.score(statistics).double(), layers[path]
        scores[path, False], scores[path, True] = own.sum(dim=1), sum_input_scores(own, layer)
    for path, layer in layers.items():
        if isinstance(layer, TRANSPOSED) and not criterion.needs:  # [in, out / groups, ...]
            own = criterion.score(LayerStatistics(layer.weight.detach().flatten(1))).double()
            own = own.reshape(layer.groups, layer.in_channels // layer.groups, layer.out_channels // layer.groups, -1)
            scores[path, False], scores[path, True] = own.sum(dim=(1, 3)).flatten(), own.sum(dim=(2, 3)).flatten()
        if isinstance(layer, NORMS) and layer.affine and not criterion.needs:
            scores[path, False] = criterion.score(LayerStatistics(layer.weight.detach()[:, None]))[:, 0].double()
    return [group_importance(group, scores) for group in groups]


def sum_input_scores(scores: Tensor, layer: nn.Module | nn.Parameter) -> Tensor:
    """The scores of a layer's input channels, [in]: each the sum over all weights that it is multiplied with."""
    weight, groups = getattr(layer, "weight", layer), getattr(layer, "groups", 1)
    assert isinstance(weight, Tensor)
    summed = scores.reshape(groups, -1, scores.shape[1]).sum(dim=1)
    return summed.reshape(groups, weight.shape[1], -1).sum(dim=2).flatten()


def group_importance(group: ChannelGroup, scores: ChannelScores) -> Tensor:
    """The importance of one group's channels, [width] float64."""
    found = []
    for member in group.members:
        channels = scores.get((member.path, member.axis == "in"))
        if channels is not None:
            own = torch.stack([channels[list(places)].sum() for places in member.places])
            found.append(own / own.mean().clamp(min=1e-30))
    if not found:
        raise UsageError(
            f"the criterion needs the inputs of linear layers or two-dimensional convolutions, and none of them shares "
            f"the channels of {group.name}. Use criterion: magnitude"
        )
    return torch.stack(found).mean(dim=0)
