"""Weights that pruning has made zero, and that training leaves so."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic import registry
from laconic.artifacts.record import Record
from laconic.errors import RecipeError
from laconic.models.checkpoint import Checkpoint
from laconic.training.loop import Event
from laconic.training.step.parts import Kit

ELSEWHERE = {
    "host-weights": "keeps copies of the weights on the device",
    "lora": "adds to the weights what it has learned",
    "qlora": "adds to the weights what it has learned",
}
"""Techniques under which a zero that is put back into a parameter is not a zero of the model."""


def kept(history: Sequence[Record], what: str) -> bool:
    """Whether a stage of the history makes this property, and no later one breaks it."""
    found = False
    for record in history:
        stage: Any = registry.resolve("stage", record.stage)
        found = what in getattr(stage, "makes", ()) or (found and what not in getattr(stage, "breaks", ()))
    return found


def holding(checkpoint: Checkpoint, techniques: Collection[str]) -> tuple[Callable[[Kit], Event], ...]:
    """What puts the zeros of a pruned checkpoint back after each step; nothing for one that has none to keep.

    Zeros are those of the parameters with two axes or more. Raises RecipeError for a technique that cannot keep them.
    """
    if not kept(checkpoint.history, "zeros"):
        return ()
    for name in ELSEWHERE:
        if name in techniques:
            raise RecipeError(
                f"{name} {ELSEWHERE[name]}, so the zeros that pruning has made would not stay. Remove {name}, or take "
                f"gradient-checkpointing, gradient-accumulation or optimizer-in-backward in its place"
            )
    zeros = {name: value.detach() == 0 for name, value in checkpoint.module.named_parameters() if value.ndim > 1}
    found = {name: zero for name, zero in zeros.items() if bool(zero.any())}
    return (lambda kit: hold(kit, found),)


def hold(kit: Kit, zeros: dict[str, Tensor]) -> Event:
    """An event that puts zeros back. zeros: where they are, bool, by the name of the parameter."""
    parameters = dict(kit.module.named_parameters())
    places = [(parameters[name], zero.to(parameters[name].device)) for name, zero in zeros.items()]

    @torch.no_grad()
    def event(done: int) -> None:
        for parameter, zero in places:
            parameter.masked_fill_(zero, 0.0)

    return event
