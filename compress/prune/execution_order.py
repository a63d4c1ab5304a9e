"""Layers in execution order, and their input moments when the layers before them have been changed already."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.statistics.layer_inputs import flatten_inputs, observe_inputs
from compress.statistics.moments import Moments, add_inputs
from laconic.models.signature import call


@dataclass(frozen=True)
class SharedInputLayers:
    """Layers that read the same tensor one after another. calls: how often they run in one forward pass, together."""

    paths: tuple[str, ...]
    calls: int


class ForwardStopped(Exception):
    """Ends a forward pass after the last layer that is observed."""


def group_by_input(module: nn.Module, batch: Mapping[str, Tensor], paths: Sequence[str]) -> list[SharedInputLayers]:
    """The layers at these paths in the order in which they first run, those that read the same tensor together. Layers
    that do not run are left out."""
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
    """(path, input moments) of each layer, group by group; later groups see the changes made to earlier ones.

    batches: the samples. The work grows with the square of the depth, halved by stopping each pass after its group.
    """
    for group in groups:
        yield from collect_group_moments(module, batches, group).items()


def collect_group_moments(
    module: nn.Module, batches: Sequence[Mapping[str, Tensor]], group: SharedInputLayers
) -> dict[str, Moments]:
    """The input moments of the layers of one group, by path."""
    found: dict[str, Moments] = {}
    mask: Tensor | None = None
    left = 0

    def observe(path: str, layer: nn.Module, inputs: Tensor) -> None:
        nonlocal left
        add_inputs(found, path, flatten_inputs(layer, inputs, mask))
        left -= 1
        if left == 0:
            raise ForwardStopped

    with torch.inference_mode(), observe_inputs(module, group.paths, observe):
        for batch in batches:
            mask, left = batch.get("attention_mask"), group.calls
            try:
                call(module, batch)
            except ForwardStopped:
                continue
    return found
