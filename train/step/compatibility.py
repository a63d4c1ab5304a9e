"""Which techniques and optimizers may be combined, from what each declares, checked before anything runs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

Slot = Literal["allocator", "batch", "weights", "attention", "loss", "precision", "activations", "compile", "optimizer"]
SLOTS: tuple[Slot, ...] = (
    "allocator",
    "batch",
    "weights",
    "attention",
    "loss",
    "precision",
    "activations",
    "compile",
    "optimizer",
)
"""The parts of a step that techniques replace, in the order in which techniques are applied."""


class Combinable(Protocol):
    """What the check reads of a technique; `Technique` says what each means."""

    slot: ClassVar[Slot]
    excludes: ClassVar[Mapping[str, str]]
    requires: ClassVar[Sequence[str]]
    requires_of_optimizer: ClassVar[Sequence[str]]
    takes_parts_of_layers: ClassVar[bool]


NEEDS = {
    "per-parameter": ("per_parameter", "steps one parameter at a time, which this optimizer cannot"),
    "stochastic-rounding": (
        "stochastic_rounding",
        "loses small updates unless the optimizer has stochastic_rounding: true",
    ),
}
"""What a technique may require of an optimizer: the attribute that tells, and the message where it is false."""

CUTS = {
    "tensor": "it needs whole layers, of which each rank computes a part",
    "pipeline": "it needs the whole model, of which each rank has some layers",
}
"""By axis of a mesh that cuts the model, why most techniques cannot be used with it."""

EXCLUSIVE_SLOTS = {"precision", "loss", "attention", "weights", "compile", "allocator"}
"""Slots that at most one technique may fill."""


def find_conflict(
    techniques: Mapping[str, Combinable],
    optimizer: Any,
    *,
    max_grad_norm: float | None = None,
    parallelism: Collection[str] = (),
    ema: float | None = None,
) -> str | None:
    """Explain why these techniques and this optimizer cannot be combined; None where they can.

    max_grad_norm: of gradient clipping, None without. parallelism: the axes of the mesh, as
    `Mesh.parallelism`; none on one device. ema: the decay of the average of the weights, None without.
    """
    if {"shard", "tensor"} & {*parallelism} and not optimizer.dtensor:
        return f"{type(optimizer).__name__} needs whole weights, and shards are parts of them. Choose adamw"
    if "zero" in parallelism and (not optimizer.exact or getattr(optimizer, "stochastic_rounding", False)):
        return (
            f"{type(optimizer).__name__} steps whole parameters or rounds them, and DeepSpeed (mesh: zero) has it step "
            f"flat parts of many. Choose adamw or sgd, without stochastic_rounding"
        )
    if "zero" in parallelism and ema is not None:
        return "ema and mesh (zero) cannot be combined: the averages would be of DeepSpeed's parts. Leave ema out"
    present = {name: (name, "Remove one of them") for name in techniques}
    if max_grad_norm is not None:
        present["max_grad_norm"] = "gradient clipping", "Set max_grad_norm: null"
    if ema is not None:
        present["ema"] = "ema", "Leave ema out"
    present |= {axis: (f"mesh ({axis})", "Remove one of them") for axis in parallelism}
    for name, technique in techniques.items():
        for axis, reason in CUTS.items():
            if axis in parallelism and not technique.takes_parts_of_layers:
                return f"{name} and mesh ({axis}) cannot be combined: {reason}. Remove one of them"
        for other, reason in technique.excludes.items():
            if other in present:
                label, advice = present[other]
                return f"{name} and {label} cannot be combined: {reason}. {advice}"
        if technique.requires and not any(other in techniques for other in technique.requires):
            return f"{name} works on top of {' or '.join(technique.requires)}. Add it"
        for need in technique.requires_of_optimizer:
            attribute, sentence = NEEDS[need]
            if not getattr(optimizer, attribute, False):
                return f"{name} {sentence}. Choose another optimizer, or other settings of it"
    for slot in SLOTS:
        held = [name for name, technique in techniques.items() if technique.slot == slot]
        if slot in EXCLUSIVE_SLOTS and len(held) > 1:
            return f"{' and '.join(held)} cannot be combined: each is the {slot} of a step. Remove one of them"
    return None
