"""How much each group of channels keeps, when those that matter least shall give most."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.prune.channel_surgery import cuts_of, mask
from compress.prune.coupling import Group
from laconic.models.signature import call

LEVELS = 4
"""Widths of a group that are tried alone, between all channels and none."""


@dataclass(frozen=True)
class Plan:
    """order: a group's channels, those to keep longest first. step: what its counts are multiples of."""

    group: Group
    order: Sequence[int]
    step: int

    def levels(self) -> list[int]:
        """The counts that are tried, all channels first."""
        counts = range((self.group.width - 1) // self.step * self.step, 0, -self.step)
        picked = (
            {counts[round(index * (len(counts) - 1) / max(LEVELS - 1, 1))] for index in range(LEVELS)}
            if counts
            else set()
        )
        return [self.group.width, *sorted(picked, reverse=True)]


def shared(
    plans: Sequence[Plan],
    uniform: Sequence[int],
    module: nn.Module,
    batch: Mapping[str, Tensor],
    fidelity: Callable[[nn.Module], float],
) -> list[int]:
    """How many channels each group keeps: as many multiplications as with `uniform`, at the least harm.

    Each group's harm is measured with it alone masked, at a few widths: one pass over the samples to choose by for
    each. Then one group after the other goes down a level, whichever has the least harm per multiplication saved.
    """
    places = positions(module, batch)
    budget = multiplications(module, places, plans, uniform)
    levels = [plan.levels() for plan in plans]
    whole = fidelity(module)
    harms = [
        [max(0.0, whole - masked(module, plan, count, fidelity)) for count in counts]
        for plan, counts in zip(plans, levels, strict=True)
    ]
    at = [0] * len(plans)

    def counts(of: Sequence[int]) -> list[int]:
        return [level[index] for level, index in zip(levels, of, strict=True)]

    left = multiplications(module, places, plans, counts(at))
    while left > budget:
        best: tuple[float, int, float] | None = None
        for number in range(len(plans)):
            if at[number] + 1 == len(levels[number]):
                continue
            lower = [*at[:number], at[number] + 1, *at[number + 1 :]]
            work = multiplications(module, places, plans, counts(lower))
            price = (harms[number][lower[number]] - harms[number][at[number]]) / max(left - work, 1e-9)
            if best is None or price < best[0]:
                best = price, number, work
        if best is None:
            break
        at[best[1]] += 1
        left = best[2]
    return counts(at)


def masked(module: nn.Module, plan: Plan, count: int, fidelity: Callable[[nn.Module], float]) -> float:
    """The fidelity with only so many channels of a group."""
    silent = copy.deepcopy(module)
    mask(silent, cuts_of([(plan.group, plan.order[count:])]))
    return fidelity(silent)


def positions(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, int]:
    """How often each layer's weight is used for a sample, by its path."""
    found: dict[str, int] = {}
    rows = len(next(iter(batch.values())))

    def hook(layer: nn.Module, args: object, answer: Tensor, path: str) -> None:
        channels = answer.shape[-1] if isinstance(layer, nn.Linear) else answer.shape[1]
        found[path] = found.get(path, 0) + answer.numel() // channels // rows

    handles = [
        layer.register_forward_hook(lambda layer, args, answer, path=path: hook(layer, args, answer, path))
        for path, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ]
    try:
        with torch.no_grad():
            call(module, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def multiplications(
    module: nn.Module, places: Mapping[str, int], plans: Sequence[Plan], counts: Sequence[int]
) -> float:
    """Of one sample, when the groups keep so many channels."""
    gone: dict[tuple[str, str], float] = {}
    for plan, count in zip(plans, counts, strict=True):
        for member in plan.group.members:
            share = 1 - count / plan.group.width
            own = sum(map(len, member.places)) * share
            gone[member.path, member.axis] = gone.get((member.path, member.axis), 0.0) + own
    total = 0.0
    for path, uses in places.items():
        layer = module.get_submodule(path)
        weight = layer.weight
        assert isinstance(weight, Tensor)
        out = weight.shape[0]
        into = weight.shape[1] * getattr(layer, "groups", 1)
        rows = 1 - (gone.get((path, "out"), 0.0) + gone.get((path, "both"), 0.0)) / out
        total += uses * weight.numel() * rows * (1 - gone.get((path, "in"), 0.0) / into)
    return total
