"""Unstructured pruning: at once, or on the cubic schedule, with healing between the steps or during one healing."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from compress.criteria.criterion import Scope, collect_statistics
from compress.distill.heal import Heal
from compress.prune.sparsity import LayerSelection, SparsityStage, measure_sparsity, score_nonzero, sparsify
from compress.prune.sparsity_pattern import EvenSparsity, FixedMask, SparsityPattern, select_lowest, split_count
from compress.statistics.layer_weights import weight_matrix
from laconic import units
from laconic.data.dataset import Dataset
from laconic.models.checkpoint import Checkpoint
from laconic.models.weights import fill, read_safetensors, write_weights
from laconic.recipes.stage import TorchContext, TorchStage
from train.optimizers.weight_average import zero_weights
from train.step.train_state import StepCallback, TrainState

NAME = "prune.unstructured"

Sparsify = Callable[[nn.Module, float], None]
"""Zeroes this share of a module's weights, in place; the module is on the CPU and in evaluation mode."""

RAMP = 0.75
"""The share of the training in which sparsity rises; the rest heals the last pruning step."""


class Unstructured(SparsityStage):
    """Make the least important weights zero.

    sparsity: the share of zeros in all selected layers together. scope: what a weight is compared with: those of all
    layers (global), of its layer, or of its output (row); by default what the criterion says. schedule: one-shot;
    iterative, in `steps` ever smaller steps on the cubic schedule, with healing in between; or training, with the same
    steps in the course of one healing (Zhu & Gupta, To prune, or not to prune, 2017). heal: the settings of
    `distill.heal`.
    """

    sparsity: units.Share = Field(default=0.5, gt=0, lt=1)
    scope: Scope | None = None
    schedule: Literal["one-shot", "iterative", "training"] = "one-shot"
    steps: int = Field(default=8, ge=2)
    heal: Heal = Heal(steps=500)

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        copied, dataset, selection = self.prepare(checkpoint, context)

        def prune(module: nn.Module, sparsity: float) -> None:
            self.sparsify(module, dataset, selection, sparsity, context)

        def prune_with_progress(module: nn.Module, sparsity: float) -> None:
            with context.steps.step(f"prune {sparsity:.0%} of the weights") as step:
                prune(module, sparsity)
                step.note = f"{len(selection.paths)} layers, {len(selection.skipped)} skipped"

        def make_checkpoint(module: nn.Module) -> Checkpoint:
            record = self.make_record(NAME, checkpoint, context, *measure_sparsity(module, selection))
            return checkpoint.after(record, module)

        if self.schedule == "one-shot":
            prune_with_progress(copied.module, self.sparsity)
            return make_checkpoint(copied.module)
        sparsities = cubic_schedule(self.sparsity, self.steps)
        if self.schedule == "iterative":
            module = prune_iteratively(copied, context, sparsities, prune_with_progress, self.heal, make_checkpoint)
            return make_checkpoint(module)
        return make_checkpoint(self.train(copied, context, selection, sparsities, prune, make_checkpoint))

    def train(
        self,
        copied: Checkpoint,
        context: TorchContext,
        selection: LayerSelection,
        sparsities: Sequence[float],
        prune: Sparsify,
        make_checkpoint: Callable[[nn.Module], Checkpoint],
    ) -> nn.Module:
        """Return the module after a training during which it was pruned."""
        schedule = assign_steps(sparsities, self.heal.count_steps(len(context.train.keys)))
        event = make_pruning_event(copied, schedule, prune, [f"{path}.weight" for path in selection.paths])
        return self.heal.train(make_checkpoint(copied.module), context, (event,)).module

    def sparsify(
        self, module: nn.Module, dataset: Dataset, selection: LayerSelection, sparsity: float, context: TorchContext
    ) -> None:
        """Make this share of the weights zero, in place."""
        patterns = self.patterns(module, dataset, selection, sparsity, context)
        criterion, seed = self.importance_criterion, context.seed
        sparsify(module, context.task, dataset, patterns, criterion, update=self.compensates, seed=seed)

    def patterns(
        self, module: nn.Module, dataset: Dataset, selection: LayerSelection, sparsity: float, context: TorchContext
    ) -> dict[str, SparsityPattern]:
        """Return the sparsity pattern of each layer."""
        criterion = self.importance_criterion
        scope = self.scope or criterion.scope
        weights = {path: weight_matrix(module.get_submodule(path)) for path in selection.paths}
        if scope == "global":
            known = collect_statistics(criterion, module, context.task, dataset, selection.paths, seed=context.seed)
            scores = [score_nonzero(criterion, known[path]) for path in selection.paths]
            (count,) = split_count([sum(weight.numel() for weight in weights.values())], sparsity)
            return dict(zip(selection.paths, map(FixedMask, select_lowest(scores, count)), strict=True))
        counts = split_count([weight.numel() for weight in weights.values()], sparsity)
        return {
            path: EvenSparsity(count, weight.shape[1], rows=scope == "row")
            for (path, weight), count in zip(weights.items(), counts, strict=True)
        }


def cubic_schedule(target: float, steps: int) -> list[float]:
    """Return the sparsity after each of so many pruning steps, rising cubically to the target."""
    return [target * (1 - (1 - number / steps) ** 3) for number in range(1, steps + 1)]


def assign_steps(sparsities: Sequence[float], steps: int) -> dict[int, float]:
    """Return the training steps after which each sparsity is reached. Of several at one step the last counts."""
    return {
        max(1, round(steps * RAMP * number / len(sparsities))): sparsity
        for number, sparsity in enumerate(sparsities, 1)
    }


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
            healing_context = replace(context, work=context.work / f"healing-{number}")
            module = heal.apply(make_checkpoint(module), healing_context).module
            save_weights(module, healed[number])
    return module


def make_pruning_event(
    checkpoint: Checkpoint, schedule: Mapping[int, float], sparsify: Sparsify, names: Sequence[str]
) -> Callable[[TrainState], StepCallback]:
    """Return an event that prunes after the steps of the schedule, and restores the zeros after every other step.

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
