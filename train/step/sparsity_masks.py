"""Keeping pruned weights at zero while a pruned model is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from laconic import registry
from laconic.artifacts.record import Record
from laconic.errors import RecipeError
from laconic.models.checkpoint import Checkpoint
from train.optimizers.weight_average import zero_weights
from train.step.technique import Technique
from train.step.train_state import StepCallback, StepCallbackFactory, TrainState


def has_property(history: Sequence[Record], name: str) -> bool:
    """Return whether a stage of a checkpoint's history makes a property, as "zeros", and no later one breaks it."""
    has_it = False
    for record in history:
        stage: Any = registry.resolve("stage", record.stage)
        has_it = name in getattr(stage, "makes", ()) or (has_it and name not in getattr(stage, "breaks", ()))
    return has_it


def keep_zeros(checkpoint: Checkpoint, techniques: Mapping[str, Technique]) -> tuple[StepCallbackFactory, ...]:
    """Make the callbacks that zero the pruned weights of a checkpoint after each step; none for one without pruned
    weights.

    Only parameters with two axes or more are masked. Raises RecipeError for a technique that loses zeros.
    """
    if not has_property(checkpoint.history, "zeros"):
        return ()
    for name, technique in techniques.items():
        if technique.loses_zeros:
            raise RecipeError(
                f"{name} {technique.loses_zeros}, so the zeros that pruning has made would not stay. Remove {name}, or "
                f"use gradient-checkpointing, gradient-accumulation or optimizer-in-backward instead"
            )
    zeros = {name: value.detach() == 0 for name, value in checkpoint.module.named_parameters() if value.ndim > 1}
    masks = {name: zero for name, zero in zeros.items() if bool(zero.any())}
    return (lambda state: mask_weights(state, masks),)


def mask_weights(state: TrainState, masks: Mapping[str, Tensor]) -> StepCallback:
    """Make a callback that sets weights, and their averages, to zero. masks: where, bool, by the parameter's name."""
    parameters = dict(state.module.named_parameters())
    masked = [(parameters[name], mask.to(parameters[name].device)) for name, mask in masks.items()]

    def callback(steps: int) -> None:
        for parameter, mask in masked:
            zero_weights(state.optimizer, parameter, mask)

    return callback
