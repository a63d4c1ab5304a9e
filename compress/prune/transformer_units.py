"""What cutting heads and cutting feed-forward units have in common: both are units that meet in one layer."""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from compress.criteria.criterion import Criterion, gather
from compress.statistics.gram import forward_batches
from compress.transformer.allocation import allocate, curves
from compress.transformer.anatomy import Kind, Site, anatomy
from compress.transformer.elimination import Normal, Sums, by_score, eliminate
from compress.transformer.proof import prove, silenced
from compress.transformer.refit_blocks import Choose, aim, settle
from compress.transformer.shapes import sizes
from compress.transformer.surgery import agree, cut, replay, structure
from laconic.artifacts.record import Record
from laconic.config import NamedSettings
from laconic.errors import RecipeError
from laconic.hashing import code_version, hash_of
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import Property, TorchContext, TorchStage, dump_settings


class Units(TorchStage):
    """Cut units of one kind, `units`.

    keep: the share of the model's units that stay. criterion: what tells the units that matter; without one, those are
    cut that the others can stand in for best. steps: cut in so many parts, each of them decided anew on what is left.
    allocate: the same share in each block, or less in those that the answers depend on less. compensate: fit the layer
    where the units meet, by least squares, so that the block gives what the original's gives. samples: how many to look
    at; the more, the better the fit, up to some thousands.
    """

    lossy: ClassVar[bool] = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges", "factors"})
    units: ClassVar[Kind]

    keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    criterion: NamedSettings | None = None
    steps: Annotated[int, Field(ge=1)] = 1
    allocate: Literal["uniform", "sensitivity"] = "uniform"
    compensate: bool = True
    samples: Annotated[int, Field(ge=1)] = 1024

    @property
    @abstractmethod
    def grain(self) -> int:
        """The count of a block's units that stay is a multiple of this."""

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        """The checkpoint with fewer units. Raises SourceError for an architecture that is not known, RecipeError for
        a share that leaves a block without units, PruningError where the proof fails."""
        context = replace(context, calibrate=context.calibrate.take(self.samples, context.seed))
        totals = [site.units for site in anatomy(checkpoint.module).of(self.units)]
        module, error = checkpoint.module, 0.0
        with context.steps.step(f"prune {self.units}", self.steps) as step:
            for number in range(1, self.steps + 1):
                module, worst = self.step(replace(checkpoint, module=module), context, totals, number)
                error = max(error, worst)
                step.advance()
        agree(module)
        left = anatomy(module).of(self.units)
        name, config = f"prune.{self.units}", dump_settings(self)
        key = hash_of(context.key, checkpoint.key, name, config, code_version(), context.calibrate.fingerprint)
        stay = sum(site.units for site in left)
        figures = {"proof": error, "units": float(stay), "units before": float(sum(totals))}
        made = structure(sizes(checkpoint.module), module, left)
        return checkpoint.after(Record(stage=name, config=config, key=key, figures=figures, structure=made), module)

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Give an empty module the same sizes."""
        replay(module, record.structure)

    def step(
        self, checkpoint: Checkpoint, context: TorchContext, totals: Sequence[int], number: int
    ) -> tuple[nn.Module, float]:
        """A copy of the module with a part of the units cut, and the error of its proof."""
        share = 1 - (1 - self.keep) * number / self.steps
        counts = self.counts(checkpoint, context, totals, share)
        module = copy.deepcopy(checkpoint.module)
        original, counterparts = aim(checkpoint, context)
        batches = list(forward_batches(context.task, context.calibrate))
        choose = self.chooser(checkpoint, context, counts)
        kept = settle(module, original, counterparts, batches, (self.units,), choose, compensate=self.compensate)
        return module, self.proof(checkpoint.module, kept, context)

    def counts(self, checkpoint: Checkpoint, context: TorchContext, totals: Sequence[int], share: float) -> list[int]:
        """How many units of each block stay. Raises RecipeError where that is none."""
        present = anatomy(checkpoint.module).of(self.units)
        wanted = [min(round(total * share / self.grain) * self.grain, total) for total in totals]
        if min(wanted) < 1:
            raise RecipeError(
                f"keep: {self.keep} of {min(totals)} units leaves none, in multiples of {self.grain}. Keep more, or "
                f"drop whole blocks (prune.layers)"
            )
        if self.allocate == "uniform" or sum(wanted) == sum(site.units for site in present):
            return [min(count, site.units) for count, site in zip(wanted, present, strict=True)]
        probe = replace(checkpoint, module=copy.deepcopy(checkpoint.module))
        found = curves(
            probe.module,
            present,
            context.task,
            context.calibrate,
            lambda module: 1 - float(context.fidelity(replace(probe, module=module)).mean()),
        )
        return allocate(found, sum(wanted), self.grain)

    def chooser(self, checkpoint: Checkpoint, context: TorchContext, counts: Sequence[int]) -> Choose:
        """What says, at a site, which units stay."""
        orders: Mapping[str, Sequence[int]] = {} if self.criterion is None else self.orders(checkpoint, context)

        def choose(site: Site, weight: Tensor, sums: Sums, *, biased: bool) -> Sequence[int]:
            count = counts[site.block]
            if count == site.units:
                return range(count)
            if site.consumer in orders:
                return sorted(orders[site.consumer][site.units - count :])
            return eliminate(Normal(weight, biased, sums), site.units, protected=count).kept(count)

        return choose

    def orders(self, checkpoint: Checkpoint, context: TorchContext) -> dict[str, Sequence[int]]:
        """The units of each site, by what the criterion gives the weights that they meet in, the lowest first."""
        assert self.criterion is not None
        criterion: Criterion = self.criterion.configure("criterion", Criterion)
        sites = anatomy(checkpoint.module).of(self.units)
        evidence = gather(
            criterion,
            copy.deepcopy(checkpoint.module),
            context.task,
            context.calibrate,
            [site.consumer for site in sites],
            seed=context.seed,
        )
        return {site.consumer: by_score(criterion.scores(evidence[site.consumer]), site.units) for site in sites}

    def proof(self, larger: nn.Module, kept: Mapping[str, Sequence[int]], context: TorchContext) -> float:
        """Cut a copy, without compensation, and hold it against the model before. Raises PruningError."""
        sites = {site.consumer: (site, kept[site.consumer]) for site in anatomy(larger).of(self.units)}
        smaller = copy.deepcopy(larger)
        for site, units in sites.values():
            cut(smaller, site, units)
        return prove(larger, lambda: silenced(larger, sites), smaller, context.task, context.calibrate)
