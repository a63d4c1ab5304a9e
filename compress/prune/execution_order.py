"""The layers of a model in the order in which they run, and what flows into each when those before it are settled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.statistics.gram import Moments, add, as_rows, watched
from laconic.models.signature import call


@dataclass(frozen=True)
class Wave:
    """Layers that are fed by the same tensor, one after another. calls: how often they run in one pass, together."""

    paths: tuple[str, ...]
    calls: int


class Enough(Exception):
    """What is behind the layers that are looked at need not run."""


def waves(module: nn.Module, batch: Mapping[str, Tensor], paths: Sequence[str]) -> list[Wave]:
    """The layers at these paths in the order in which they run first; those that do not run are left out."""
    groups: list[list[str]] = []
    calls: dict[str, int] = {}
    last: list[Tensor] = []

    def look(path: str, layer: nn.Module, inputs: Tensor) -> None:
        same = bool(last) and last[0].data_ptr() == inputs.data_ptr() and last[0].shape == inputs.shape
        last[:] = [inputs]  # held, lest another tensor be put in its place
        if path not in calls and not same:
            groups.append([])
        if path not in calls:
            groups[-1].append(path)
        calls[path] = calls.get(path, 0) + 1

    with torch.inference_mode(), watched(module, paths, look):
        call(module, batch)
    return [Wave(tuple(group), sum(calls[path] for path in group)) for group in groups]


def settled(
    module: nn.Module, given: Sequence[Mapping[str, Tensor]], found: Sequence[Wave]
) -> Iterator[tuple[str, Moments]]:
    """The moments of each layer, wave by wave, those of later waves taken when the earlier ones have been changed.

    given: the samples as batches. The work grows with the square of the depth, halved by leaving each pass where its
    wave ends.
    """
    for wave in found:
        yield from wave_moments(module, given, wave).items()


def wave_moments(module: nn.Module, given: Sequence[Mapping[str, Tensor]], wave: Wave) -> dict[str, Moments]:
    """The moments of the layers of one wave."""
    found: dict[str, Moments] = {}
    mask: Tensor | None = None
    left = 0

    def look(path: str, layer: nn.Module, inputs: Tensor) -> None:
        nonlocal left
        add(found, path, as_rows(layer, inputs, mask))
        left -= 1
        if left == 0:
            raise Enough

    with torch.inference_mode(), watched(module, wave.paths, look):
        for batch in given:
            mask, left = batch.get("attention_mask"), wave.calls
            try:
                call(module, batch)
            except Enough:
                continue
    return found
