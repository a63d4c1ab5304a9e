"""First and second moments of layer inputs, on which pruning, factorization and rounding base most decisions:
of all layers at once, or in execution order when the layers before have been changed already."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.statistics.layer_inputs import (
    ROWS,
    find_tokens,
    flatten_inputs,
    forward_batches,
    iterate_inputs,
    observe_inputs,
)
from laconic.data.dataset import Dataset
from laconic.models.signature import call
from laconic.tasks.task import Task


@dataclass
class Moments:
    """Sums over the inputs x of a layer, each [in].

    gram: the sum of x xT, [in, in] float32. total: the sum of x, [in] float32. count: the number of inputs.
    """

    gram: Tensor
    total: Tensor
    count: int

    @classmethod
    def zeros(cls, like: Tensor, width: int) -> "Moments":
        """Make the moments of no inputs of this width, on the device and in the dtype of a tensor."""
        return cls(like.new_zeros(width, width), like.new_zeros(width), 0)

    def add(self, x: Tensor) -> None:
        """Count these inputs, [count, in]."""
        self.gram.addmm_(x.T, x)
        self.total += x.sum(dim=0)
        self.count += len(x)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.gram + other.gram, self.total + other.total, self.count + other.count)

    @property
    def norms(self) -> Tensor:
        """The L2 norm of each input feature over all inputs, [in]."""
        return self.gram.diagonal().clamp(min=0).sqrt()

    def centred(self) -> Tensor:
        """Return the sum of (x - mean) (x - mean)T, [in, in] float64."""
        count = max(self.count, 1)
        mean = self.total.double() / count
        return self.gram.double() - count * torch.outer(mean, mean)


def collect_moments(
    module: nn.Module, task: Task, dataset: Dataset, paths: Sequence[str], *, rows: int = ROWS
) -> dict[str, Moments]:
    """Return the input moments of the linear or convolutional layers at these paths over a dataset, by path.

    Padding tokens (by the attention mask of the samples) are not counted. The inputs of a convolution are its patches,
    [channels of a group x kernel], of all groups together. Memory: one [in, in] matrix a layer.
    """
    moments: dict[str, Moments] = {}
    with torch.inference_mode():
        for path, inputs in iterate_inputs(module, forward_batches(task, dataset, rows), paths):
            add_inputs(moments, path, inputs)
    return moments


def add_inputs(moments: dict[str, Moments], path: str, inputs: Tensor) -> None:
    """Count inputs [count, in] of the layer at this path."""
    if path not in moments:
        moments[path] = Moments.zeros(inputs, inputs.shape[1])
    moments[path].add(inputs)


@dataclass(frozen=True)
class SharedInputLayers:
    """Layers that read the same tensor one after another. calls: how often they run in one forward pass, together."""

    paths: tuple[str, ...]
    calls: int


class ForwardStopped(Exception):
    """Ends a forward pass after the last layer that is observed."""


def group_by_input(module: nn.Module, batch: Mapping[str, Tensor], paths: Sequence[str]) -> list[SharedInputLayers]:
    """Return the layers at these paths in the order in which they first run, those that read the same tensor together.
    Layers that do not run are left out."""
    groups: list[list[str]] = []
    calls: dict[str, int] = {}
    last: list[Tensor] = []

    def observe(path: str, layer: nn.Module, inputs: Tensor) -> None:
        same = bool(last) and last[0].data_ptr() == inputs.data_ptr() and last[0].shape == inputs.shape
        last[:] = [inputs]  # referenced, so that its memory is not reused for another tensor
        if path not in calls and not same:
            groups.append([])
        if path not in calls:
            groups[-1].append(path)
        calls[path] = calls.get(path, 0) + 1

    with torch.inference_mode(), observe_inputs(module, paths, observe):
        call(module, batch)
    return [SharedInputLayers(tuple(group), sum(calls[path] for path in group)) for group in groups]


def iterate_moments(
    module: nn.Module, batches: Sequence[Mapping[str, Tensor]], groups: Sequence[SharedInputLayers]
) -> Iterator[tuple[str, Moments]]:
    """Yield (path, input moments) of each layer, group by group; later groups see the changes made to earlier ones.

    batches: the samples. The work grows with the square of the depth, halved by stopping each pass after its group.
    """
    for group in groups:
        yield from collect_group_moments(module, batches, group).items()


def collect_group_moments(
    module: nn.Module, batches: Sequence[Mapping[str, Tensor]], group: SharedInputLayers
) -> dict[str, Moments]:
    """Return the input moments of the layers of one group, by path."""
    moments: dict[str, Moments] = {}
    mask: Tensor | None = None
    left = 0

    def observe(path: str, layer: nn.Module, inputs: Tensor) -> None:
        nonlocal left
        add_inputs(moments, path, flatten_inputs(layer, inputs, mask))
        left -= 1
        if left == 0:
            raise ForwardStopped

    with torch.inference_mode(), observe_inputs(module, group.paths, observe):
        for batch in batches:
            mask, left = find_tokens(batch), group.calls
            try:
                call(module, batch)
            except ForwardStopped:
                continue
    return moments
