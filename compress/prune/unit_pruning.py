"""Pruning of attention heads and FFN units: units of a block that one layer consumes."""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from compress.criteria.criterion import NamedCriterion, collect_statistics
from compress.statistics.layer_inputs import forward_batches
from compress.statistics.least_squares import NormalEquations, RegressionSums
from compress.transformer.proof import broken_cut, mask_units, prove
from compress.transformer.refit_blocks import SelectUnits, find_target, refit_blocks
from compress.transformer.surgery import describe_structure, keep_units, read_sizes, replay_structure, update_config
from compress.transformer.unit_allocation import RIDGE, allocate_units, eliminate_units, measure_curves, rank_units
from laconic.artifacts.record import Record
from laconic.errors import RecipeError
from laconic.models.anatomy import Site, UnitKind, anatomy
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import Property, TorchContext, TorchStage


class UnitPruning(TorchStage):
    """Prune units of the kind `units` in every block.

    keep: the share of the model's units that stays. criterion: the importance criterion; by default the units are
    eliminated whose removal the others compensate best (optimal brain surgeon). steps: prune in so many steps, each
    deciding anew on what is left. allocate: the same share in each block, or by the measured sensitivity of the output
    to each block. compensate: refit the layer that consumes the units, by least squares, to the original's activations.
    samples: how many calibration samples to use; more make a better fit, up to some thousands.
    """

    lossy: ClassVar[bool] = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges", "factors"})
    units: ClassVar[UnitKind]

    keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    criterion: NamedCriterion | None = None
    steps: Annotated[int, Field(ge=1)] = 1
    allocate: Literal["uniform", "sensitivity"] = "uniform"
    compensate: bool = True
    samples: Annotated[int, Field(ge=1)] = 1024

    @property
    @abstractmethod
    def multiple(self) -> int:
        """The number of a block's units that stays is a multiple of this."""

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        """Return the checkpoint with fewer units. Raises SourceError for an unknown architecture, RecipeError for a
        share that leaves a block without units, PruningError where the proof fails."""
        context = replace(context, calibrate=context.calibrate.take(self.samples, context.seed))
        sites = anatomy(checkpoint.module).of(self.units)
        module, error = checkpoint.module, 0.0
        with context.steps.step(f"prune {self.units}", self.steps) as step:
            for number in range(1, self.steps + 1):
                module, worst = self.prune_step(replace(checkpoint, module=module), context, sites, number)
                error = max(error, worst)
                step.advance()
        update_config(module)
        left = anatomy(module).of(self.units)
        remaining = sum(now.units * now.width / was.width for now, was in zip(left, sites, strict=True))
        figures = {"proof": error, "units": remaining, "units before": float(sum(site.units for site in sites))}
        structure = describe_structure(read_sizes(checkpoint.module), module, left)
        return checkpoint.after(
            self.make_record(f"prune.{self.units}", checkpoint, context, figures, structure), module
        )

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Give an empty module the same structure."""
        replay_structure(module, record.structure)

    def prune_step(
        self, checkpoint: Checkpoint, context: TorchContext, whole: Sequence[Site], number: int
    ) -> tuple[nn.Module, float]:
        """Return a copy of the module after pruning step `number`, and the error of its proof. whole: the sites before
        the first step."""
        share = 1 - (1 - self.keep) * number / self.steps
        counts = self.counts(checkpoint, context, whole, share)
        module = copy.deepcopy(checkpoint.module)
        original, counterparts = find_target(checkpoint, context)
        batches = list(forward_batches(context.task, context.calibrate))
        select = self.make_selector(checkpoint, context, counts)
        kinds = (self.units,)
        try:
            kept = refit_blocks(module, original, counterparts, batches, kinds, select, compensate=self.compensate)
        except (RuntimeError, ValueError, IndexError) as error:  # something in a block counts the units in its own way
            raise broken_cut(f"it does not run: {str(error).splitlines()[0]}") from error
        return module, self.proof(checkpoint.module, kept, context)

    def counts(self, checkpoint: Checkpoint, context: TorchContext, whole: Sequence[Site], share: float) -> list[int]:
        """Return how many units of each block stay. Raises RecipeError if a block would have none."""
        present = anatomy(checkpoint.module).of(self.units)
        wanted = [min(round(site.units * share / self.multiple) * self.multiple, site.units) for site in whole]
        if min(wanted) < 1:
            raise RecipeError(
                f"keep: {self.keep} of {min(site.units for site in whole)} units leaves none, in multiples of "
                f"{self.multiple}. Keep more, or drop whole blocks (prune.layers)"
            )
        # Where one key-value head is left, its query heads are units, each of which is narrower.
        targets = [count * was.width // now.width for count, was, now in zip(wanted, whole, present, strict=True)]
        if self.allocate == "uniform" or sum(targets) == sum(site.units for site in present):
            return [min(count, site.units) for count, site in zip(targets, present, strict=True)]
        probe = replace(checkpoint, module=copy.deepcopy(checkpoint.module))
        curves = measure_curves(
            probe.module,
            present,
            context.task,
            context.calibrate,
            lambda module: 1 - float(context.fidelity(replace(probe, module=module)).mean()),
        )
        return allocate_units(curves, sum(targets), self.multiple)

    def make_selector(self, checkpoint: Checkpoint, context: TorchContext, counts: Sequence[int]) -> SelectUnits:
        """Return the function that chooses the units of a site that stay."""
        orders = self.rank(checkpoint, context, self.criterion) if self.criterion else {}

        def select(site: Site, weight: Tensor, sums: RegressionSums, *, biased: bool) -> Sequence[int]:
            count = counts[site.block]
            if count == site.units:
                return range(count)
            if site.consumer in orders:
                return sorted(orders[site.consumer][site.units - count :])
            equations = NormalEquations(weight, biased, sums, RIDGE)
            return eliminate_units(equations, site.units, protected=count).kept(count)

        return select

    def rank(self, checkpoint: Checkpoint, context: TorchContext, named: NamedCriterion) -> dict[str, Sequence[int]]:
        """Return the units of each site in ascending order of the criterion's scores of the consumer's weights."""
        criterion = named.make_criterion()
        sites = anatomy(checkpoint.module).of(self.units)
        statistics = collect_statistics(
            criterion,
            copy.deepcopy(checkpoint.module),
            context.task,
            context.calibrate,
            [site.consumer for site in sites],
            seed=context.seed,
        )
        return {site.consumer: rank_units(criterion.score(statistics[site.consumer]), site.units) for site in sites}

    def proof(self, larger: nn.Module, kept: Mapping[str, Sequence[int]], context: TorchContext) -> float:
        """Prune a copy without compensation, and compare it with the masked model. Raises PruningError."""
        sites = {site.consumer: (site, kept[site.consumer]) for site in anatomy(larger).of(self.units)}
        smaller = copy.deepcopy(larger)
        for site, units in sites.values():
            keep_units(smaller, site, units)
        return prove(larger, lambda: mask_units(larger, sites), smaller, context.task, context.calibrate)


class Heads(UnitPruning):
    """Prune attention heads; of query heads that share keys and values, all or none."""

    units: ClassVar[UnitKind] = "heads"

    @property
    def multiple(self) -> int:
        return 1


class Ffn(UnitPruning):
    """Prune FFN units. round_to: the width that stays is a multiple of this, for the hardware's kernels."""

    units: ClassVar[UnitKind] = "ffn"
    renamed: ClassVar[Mapping[str, str]] = {"multiple": "round_to"}

    round_to: Annotated[int, Field(ge=1)] = 32

    @property
    def multiple(self) -> int:
        return self.round_to
