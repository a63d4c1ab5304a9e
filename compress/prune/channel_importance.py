"""What each channel of a group is worth: the scores of all weights that go with it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compress.criteria.criterion import Criterion, Evidence, gather
from compress.prune.channel_surgery import find
from compress.prune.coupling import NORMS, Group
from laconic.data.dataset import Dataset
from laconic.errors import UsageError
from laconic.tasks.task import Task

Sides = dict[tuple[str, bool], Tensor]
"""The scores of a layer's channels, by its path and by whether it takes them."""


def worths(
    criterion: Criterion, module: nn.Module, task: Task, dataset: Dataset, groups: Sequence[Group], seed: int
) -> list[Tensor]:
    """For each group the worth of its channels, [width] float64, 1 on average.

    Each layer's scores are brought to a mean of 1 before they are added, so that none speaks louder for being larger.
    Raises UsageError where the criterion can look at none of a group's layers.
    """
    paths = list(dict.fromkeys(member.path for group in groups for member in group.members))
    layers = {path: find(module, path) for path in paths}
    known = (nn.Linear, nn.Conv2d) if criterion.needs else (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    readable = [path for path, layer in layers.items() if isinstance(layer, known)]
    sides: Sides = {}
    for path, evidence in gather(criterion, module, task, dataset, readable, seed=seed).items():
        scores, layer = criterion.scores(evidence).double(), layers[path]
        sides[path, False], sides[path, True] = scores.sum(dim=1), taken(scores, layer)
    for path, layer in layers.items():
        if isinstance(layer, NORMS) and layer.affine and not criterion.needs:
            sides[path, False] = criterion.scores(Evidence(layer.weight.detach()[:, None]))[:, 0].double()
    return [worth(group, sides) for group in groups]


def taken(scores: Tensor, layer: nn.Module | nn.Parameter) -> Tensor:
    """The worth of the channels [in] that a layer takes: of all weights that it multiplies each with."""
    weight, groups = getattr(layer, "weight", layer), getattr(layer, "groups", 1)
    assert isinstance(weight, Tensor)
    summed = scores.reshape(groups, -1, scores.shape[1]).sum(dim=1)
    return summed.reshape(groups, weight.shape[1], -1).sum(dim=2).flatten()


def worth(group: Group, sides: Sides) -> Tensor:
    """[width] float64."""
    found = []
    for member in group.members:
        scores = sides.get((member.path, member.axis == "in"))
        if scores is not None:
            own = torch.stack([scores[list(places)].sum() for places in member.places])
            found.append(own / own.mean().clamp(min=1e-30))
    if not found:
        raise UsageError(
            f"the criterion looks at what flows through linear layers and convolutions in two dimensions, and there is "
            f"none among those that share the channels of {group.name}. Take criterion: magnitude"
        )
    return torch.stack(found).mean(dim=0)
