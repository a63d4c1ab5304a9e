"""Which techniques and which optimizer may be combined: read off what each says of itself, before anything runs."""

from collections.abc import Mapping
from typing import Any

from laconic.errors import RecipeError
from laconic.training.step.technique import SLOTS, Technique

NEEDS = {
    "per-parameter": ("per_parameter", "steps one parameter at a time, which this optimizer cannot"),
    "stochastic-rounding": (
        "stochastic_rounding",
        "loses small updates unless the optimizer has stochastic_rounding: true",
    ),
}
"""What a technique may ask of an optimizer: the attribute that tells, and what is said where it is false."""

ONE = {"precision", "loss", "attention", "weights", "compile", "allocator"}
"""Slots that hold one technique at most."""


def check(
    techniques: Mapping[str, Technique], optimizer: Any, *, clip: float | None = None, way: str | None = None
) -> None:
    """Raise RecipeError for the first two that cannot be combined, saying why. way: as in `conflict`."""
    fault = conflict(techniques, optimizer, clip=clip, way=way)
    if fault:
        raise RecipeError(fault)


def conflict(
    techniques: Mapping[str, Technique], optimizer: Any, *, clip: float | None = None, way: str | None = None
) -> str | None:
    """Why these cannot be combined; None where they can. way: how they are spread over ranks, "replicate" or "shard";
    None where they are not."""
    if way == "shard" and not optimizer.dtensor:
        return f"{type(optimizer).__name__} needs whole weights, and shards are parts of them. Choose adamw"
    for name, technique in techniques.items():
        for other, reason in technique.excludes.items():
            if other in techniques:
                return f"{name} and {other} cannot be combined: {reason}. Remove one of them"
        if technique.requires and not any(other in techniques for other in technique.requires):
            return f"{name} works on top of {' or '.join(technique.requires)}. Add it"
        if clip is not None and "clip" in technique.excludes:
            return f"{name} and clip cannot be combined: {technique.excludes['clip']}. Set clip: null"
        if way is not None and way in technique.excludes:
            return f"{name} and mesh ({way}) cannot be combined: {technique.excludes[way]}. Remove one of them"
        for need in technique.requires_of_optimizer:
            attribute, sentence = NEEDS[need]
            if not getattr(optimizer, attribute, False):
                return f"{name} {sentence}. Choose another optimizer, or other settings of it"
    for slot in SLOTS:
        held = [name for name, technique in techniques.items() if technique.slot == slot]
        if slot in ONE and len(held) > 1:
            return f"{' and '.join(held)} cannot be combined: each is the {slot} of a step. Remove one of them"
    return None


def ordered(techniques: Mapping[str, Technique]) -> list[Technique]:
    """In the order in which they are applied."""
    return sorted(techniques.values(), key=lambda technique: SLOTS.index(technique.slot))
