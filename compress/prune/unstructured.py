"""Single weights become zero, wherever they matter least: at once, in steps with healing between, or while healing."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from torch import nn

from compress.criteria.criterion import Scope, gather
from compress.distill.heal import Heal
from compress.prune.gradual import Cut, between, during, places, shares
from compress.prune.layer_selection import Chosen
from compress.prune.pattern import Fixed, Pattern, Share, lowest, spread
from compress.prune.sparsity import scored, sparsify
from compress.prune.sparsity_stage import Zeros
from compress.statistics.gram import matrix
from laconic import units
from laconic.data.dataset import Dataset
from laconic.recipes.stage import TorchContext

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

NAME = "prune.unstructured"


class Unstructured(Zeros):
    """The share of the weights that matter least become zero.

    sparsity: of the weights of all chosen layers together. scope: what a weight is compared with: those of all layers,
    of its layer, or of its output's row; by default what the criterion says. schedule: one-shot; iterative, in `steps`
    cuts that become ever smaller, healed in between; or training, with as many cuts in the course of one healing (Zhu &
    Gupta, To prune, or not to prune, 2017). heal: how, as `distill.heal` has it.
    """

    sparsity: units.Share = Field(default=0.5, gt=0, lt=1)
    scope: Scope | None = None
    schedule: Literal["one-shot", "iterative", "training"] = "one-shot"
    steps: int = Field(default=8, ge=2)
    heal: Heal = Heal(steps=500)

    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        own, dataset, chosen = self.begin(checkpoint, context)

        def cut(module: nn.Module, share: float) -> None:
            self.cut(module, dataset, chosen, share, context)

        def shown(module: nn.Module, share: float) -> None:
            with context.steps.step(f"prune {share:.0%} of the weights") as step:
                cut(module, share)
                step.note = f"{len(chosen.paths)} layers, {len(chosen.left)} left as they were"

        def pruned(module: nn.Module) -> "Checkpoint":
            return checkpoint.after(self.record(NAME, checkpoint, module, chosen, context), module)

        if self.schedule == "one-shot":
            shown(own.module, self.sparsity)
            return pruned(own.module)
        planned = shares(self.sparsity, self.steps)
        if self.schedule == "iterative":
            return pruned(between(own, context, planned, shown, self.heal, pruned))
        return pruned(self.trained(own, context, chosen, planned, cut, pruned))

    def trained(
        self,
        own: "Checkpoint",
        context: TorchContext,
        chosen: Chosen,
        planned: Sequence[float],
        cut: Cut,
        pruned: Callable[[nn.Module], "Checkpoint"],
    ) -> nn.Module:
        """The module after a training in which it was cut."""
        when = places(planned, self.heal.count_steps(len(context.train.keys)))
        event = during(own, when, cut, [f"{path}.weight" for path in chosen.paths])
        return self.heal.taught(pruned(own.module), context, (event,)).module

    def cut(self, module: nn.Module, dataset: Dataset, chosen: Chosen, share: float, context: TorchContext) -> None:
        """Make this share of the weights zero, in place."""
        patterns = self.patterns(module, dataset, chosen, share, context)
        sparsify(module, context.task, dataset, patterns, self.measure, update=self.updates, seed=context.seed)

    def patterns(
        self, module: nn.Module, dataset: Dataset, chosen: Chosen, share: float, context: TorchContext
    ) -> dict[str, Pattern]:
        """What has to be zero in each layer."""
        scope = self.scope or self.measure.scope
        weights = {path: matrix(module.get_submodule(path)) for path in chosen.paths}
        total = sum(weight.numel() for weight in weights.values())
        if scope == "global":
            known = gather(self.measure, module, context.task, dataset, chosen.paths, seed=context.seed)
            scores = [scored(self.measure, known[path]) for path in chosen.paths]
            (count,) = spread([total], share)
            return dict(zip(chosen.paths, map(Fixed, lowest(scores, count)), strict=True))
        counts = spread([weight.numel() for weight in weights.values()], share)
        return {
            path: Share(count, weight.shape[1], rows=scope == "row")
            for (path, weight), count in zip(weights.items(), counts, strict=True)
        }
