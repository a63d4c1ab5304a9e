"""Gradual pruning on the cubic sparsity schedule, with healing between the steps or during one training.

Zhu & Gupta, To prune, or not to prune: exploring the efficacy of pruning for model compression (2017).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from laconic.models.checkpoint import Checkpoint
from laconic.models.weights import fill, read_safetensors, write_weights
from laconic.recipes.stage import TorchContext, TorchStage
from train.optimizers.weight_average import zero_weights
from train.step.train_state import StepCallback, TrainState

Sparsify = Callable[[nn.Module, float], None]
"""Zeroes this share of a module's weights, in place; the module is on the CPU and in evaluation mode."""

RAMP = 0.75
"""The share of the training in which sparsity rises; the rest heals the last pruning step."""


def cubic_schedule(target: float, steps: int) -> list[float]:
    """The sparsity after each of so many pruning steps, rising cubically to the target."""
    return [target * (1 - (1 - number / steps) ** 3) for number in range(1, steps + 1)]


def assign_steps(sparsities: Sequence[float], steps: int) -> dict[int, float]:
    """The training steps after which each sparsity is reached. Of several at one step the last counts."""
    return {max(1, round(steps * RAMP * number / len(sparsities))): each for number, each in enumerate(sparsities, 1)}


def prune_iteratively(
    checkpoint: Checkpoint,
    context: TorchContext,
    sparsities: Sequence[float],
    sparsify: Sparsify,
    heal: TorchStage,
    make_checkpoint: Callable[[nn.Module], Checkpoint],
) -> nn.Module:
    """Prune and heal in turns: the module after the last pruning step, not healed yet.

    make_checkpoint: a checkpoint of the module, whose history says that it has zeros to keep. An interrupted run
    resumes in the healing that was interrupted.
    """
    module = checkpoint.module
    healed = [context.work / f"healed-{number}.safetensors" for number in range(1, len(sparsities))]
    done = sum(path.is_file() for path in healed)
    if done:
        fill(module, read_safetensors(healed[done - 1]), healed[done - 1])
    for number, sparsity in enumerate(sparsities[done:], done):
        sparsify(module, sparsity)
        if number < len(healed):
            own = replace(context, work=context.work / f"healing-{number}")
            module = heal.apply(make_checkpoint(module), own).module
            save_weights(module, healed[number])
    return module


def make_pruning_event(
    checkpoint: Checkpoint, schedule: Mapping[int, float], sparsify: Sparsify, names: Sequence[str]
) -> Callable[[TrainState], StepCallback]:
    """An event that prunes after the steps of the schedule, and restores the zeros after every other step.

    checkpoint: what the training begins with. names: of the weights that are pruned.
    """
    copied = copy.deepcopy(checkpoint.module)

    def begin(state: TrainState) -> StepCallback:
        parameters = dict(state.module.named_parameters())
        # In a resumed run these are the zeros of the earlier pruning steps.
        zeros = {name: parameters[name].detach() == 0 for name in names}

        @torch.no_grad()
        def callback(done: int) -> None:
            for name, zero in zeros.items():
                zero_weights(state.optimizer, parameters[name], zero)
            if done in schedule:
                weights = state.weights()
                copied.load_state_dict({name: weights[name] for name in copied.state_dict()})
                sparsify(copied, schedule[done])
                for name in names:
                    parameters[name].copy_(copied.get_parameter(name))
                    zeros[name] = parameters[name] == 0
                    zero_weights(state.optimizer, parameters[name], zeros[name])

        return callback

    return begin


def save_weights(module: nn.Module, path: Path) -> None:
    """Write the weights atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(".partial")
    write_weights(module, made)
    made.replace(path)
