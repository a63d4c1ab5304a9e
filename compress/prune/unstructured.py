"""Unstructured pruning: at once, iteratively with healing between the steps, or during one healing."""

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field
from torch import nn

from compress.criteria.criterion import Scope, collect_statistics
from compress.distill.heal import Heal
from compress.prune.gradual import Sparsify, assign_steps, cubic_schedule, make_pruning_event, prune_iteratively
from compress.prune.layer_selection import LayerSelection
from compress.prune.sparsity import score_nonzero, sparsify
from compress.prune.sparsity_pattern import EvenSparsity, FixedMask, SparsityPattern, select_lowest, split_count
from compress.prune.sparsity_stage import SparsityStage
from compress.statistics.layer_weights import weight_matrix
from laconic import units
from laconic.data.dataset import Dataset
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import TorchContext

NAME = "prune.unstructured"


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
        own, dataset, selection = self.prepare(checkpoint, context)

        def prune(module: nn.Module, sparsity: float) -> None:
            self.sparsify(module, dataset, selection, sparsity, context)

        def prune_with_progress(module: nn.Module, sparsity: float) -> None:
            with context.steps.step(f"prune {sparsity:.0%} of the weights") as step:
                prune(module, sparsity)
                step.note = f"{len(selection.paths)} layers, {len(selection.skipped)} skipped"

        def make_checkpoint(module: nn.Module) -> Checkpoint:
            return checkpoint.after(self.record(NAME, checkpoint, module, selection, context), module)

        if self.schedule == "one-shot":
            prune_with_progress(own.module, self.sparsity)
            return make_checkpoint(own.module)
        sparsities = cubic_schedule(self.sparsity, self.steps)
        if self.schedule == "iterative":
            module = prune_iteratively(own, context, sparsities, prune_with_progress, self.heal, make_checkpoint)
            return make_checkpoint(module)
        return make_checkpoint(self.train(own, context, selection, sparsities, prune, make_checkpoint))

    def train(
        self,
        own: Checkpoint,
        context: TorchContext,
        selection: LayerSelection,
        sparsities: Sequence[float],
        prune: Sparsify,
        make_checkpoint: Callable[[nn.Module], Checkpoint],
    ) -> nn.Module:
        """The module after a training during which it was pruned."""
        schedule = assign_steps(sparsities, self.heal.count_steps(len(context.train.keys)))
        event = make_pruning_event(own, schedule, prune, [f"{path}.weight" for path in selection.paths])
        return self.heal.train(make_checkpoint(own.module), context, (event,)).module

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
        """The sparsity pattern of each layer."""
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
