"""Keeping pruned weights at zero while a pruned model is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from laconic import registry
from laconic.artifacts.record import Record
from laconic.errors import RecipeError
from train.optimizers.parameterwise import local
from train.optimizers.weight_average import zero_weights
from train.step.technique import Technique
from train.step.train_state import StepCallback, TrainState


def has_property(history: Sequence[Record], name: str) -> bool:
    """Return whether a stage of a checkpoint's history makes a property, as "zeros", and no later one breaks it."""
    has_it = False
    for record in history:
        stage: Any = registry.resolve("stage", record.stage)
        has_it = name in getattr(stage, "makes", ()) or (has_it and name not in getattr(stage, "breaks", ()))
    return has_it


def must_keep_zeros(history: Sequence[Record], techniques: Mapping[str, Technique], zero: int | None) -> bool:
    """Return whether a checkpoint with this history has pruned weights. zero: the stage of DeepSpeed's ZeRO; None
    without. Raises RecipeError for a technique or a stage that loses their zeros."""
    if not has_property(history, "zeros"):
        return False
    if zero == 3:
        raise RecipeError("mesh: zero: 3 shards weights, and zeros that pruning has made would be lost. Set zero: 2")
    for name, technique in techniques.items():
        if technique.loses_zeros:
            raise RecipeError(
                f"{name} {technique.loses_zeros}, so the zeros that pruning has made would not stay. Remove {name}, or "
                f"use gradient-checkpointing, gradient-accumulation or optimizer-in-backward instead"
            )
    return True


def mask_weights(state: TrainState) -> StepCallback:
    """Make a callback that sets the weights that are zero now, and their averages, to zero. Each rank masks its shards.

    Only parameters with two axes or more are masked.
    """
    masked: list[tuple[Tensor, Tensor]] = []
    for parameter in state.module.parameters():
        zeros = local(parameter).detach() == 0
        if parameter.ndim > 1 and bool(zeros.any()):
            masked.append((parameter, zeros))

    def callback(steps: int) -> None:
        for parameter, zeros in masked:
            zero_weights(state.optimizer, parameter, zeros)

    return callback
