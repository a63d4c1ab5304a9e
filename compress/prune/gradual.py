"""Cuts in steps that come ever smaller, with healing between them or in its course.

Zhu & Gupta, To prune, or not to prune: exploring the efficacy of pruning for model compression (2017).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from compress.distill.heal import Heal
from laconic.models.weights import fill, read_safetensors, write_weights
from laconic.recipes.stage import TorchContext
from laconic.training.step.train_state import StepCallback, StepCallbackFactory, TrainState

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

Cut = Callable[[nn.Module, float], None]
"""Makes this share of a module's weights zero, in place, the module being on the CPU in evaluation mode."""

RAMP = 0.75
"""The share of the training in which cuts are made; what is left is for the last of them to heal."""


def shares(target: float, steps: int) -> list[float]:
    """The share of zeros after each of so many cuts, rising with the third power to the target."""
    return [target * (1 - (1 - number / steps) ** 3) for number in range(1, steps + 1)]


def places(planned: Sequence[float], steps: int) -> dict[int, float]:
    """After which steps of a training each share is cut. Of cuts that fall on one step the last is made."""
    return {max(1, round(steps * RAMP * number / len(planned))): share for number, share in enumerate(planned, 1)}


def between(
    checkpoint: "Checkpoint",
    context: TorchContext,
    planned: Sequence[float],
    cut: Cut,
    heal: Heal,
    pruned: Callable[[nn.Module], "Checkpoint"],
) -> nn.Module:
    """Cut, heal, cut again: the module with the last cut, which nothing has healed yet.

    pruned: a checkpoint of the module, whose history says that it has zeros to keep. An interrupted run goes on with
    the healing that it was in.
    """
    module = checkpoint.module
    healed = [context.work / f"healed-{number}.safetensors" for number in range(1, len(planned))]
    done = sum(path.is_file() for path in healed)
    if done:
        fill(module, read_safetensors(healed[done - 1]), healed[done - 1])
    for number, share in enumerate(planned[done:], done):
        cut(module, share)
        if number < len(healed):
            own = replace(context, work=context.work / f"healing-{number}")
            module = heal.apply(pruned(module), own).module
            keep(module, healed[number])
    return module


def during(
    checkpoint: "Checkpoint", planned: Mapping[int, float], cut: Cut, names: Sequence[str]
) -> StepCallbackFactory:
    """A callback that cuts after these steps, and puts back the zeros after every other.

    checkpoint: what the training begins with. names: of the weights that are cut.
    """
    copied = copy.deepcopy(checkpoint.module)

    def begin(state: TrainState) -> StepCallback:
        parameters = dict(state.module.named_parameters())
        # Where a run was resumed, these are the zeros of the cuts before it.
        zeros = {name: parameters[name].detach() == 0 for name in names}

        @torch.no_grad()
        def callback(done: int) -> None:
            for name, zero in zeros.items():
                parameters[name].masked_fill_(zero, 0.0)
            if done in planned:
                weights = state.weights()
                copied.load_state_dict({name: weights[name] for name in copied.state_dict()})
                cut(copied, planned[done])
                for name in names:
                    parameters[name].copy_(copied.get_parameter(name))
                    zeros[name] = parameters[name] == 0

        return callback

    return begin


def keep(module: nn.Module, path: Path) -> None:
    """Write the weights, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(".partial")
    write_weights(module, made)
    made.replace(path)
