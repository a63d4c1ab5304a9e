"""What cutting heads and cutting feed-forward units have in common: both are units that meet in one layer."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from compress.anatomy import Kind, Site, anatomy
from compress.compensate import Fit, Normal, by_score, eliminate, put
from compress.criterion import Evidence
from compress.gram import forward_batches, matrix
from compress.passage import Passage, start
from compress.proof import prove, silenced
from compress.shapes import sizes
from compress.surgery import agree, columns, cut, replay, structure
from laconic import registry
from laconic.checkpoint import Checkpoint
from laconic.errors import RecipeError
from laconic.record import Record, code_version, hash_of
from laconic.stage import TorchContext, TorchStage

Share = Annotated[float, Field(gt=0, le=1)]


class Units(TorchStage):
    """Cut units of one kind.

    keep: the share of the model's units that stay. criterion: what tells the units that matter, by name; without one,
    those are cut that the others can stand in for best. steps: cut in so many parts, each of them decided anew.
    allocate: the same share of each block, or less of those that the answers depend on less. compensate: fit the
    layer where the units meet, by least squares, to what the original has there.
    """

    lossy = True
    kind_of_units: ClassVar[Kind]

    keep: Share = 0.5
    criterion: str | None = None
    steps: Annotated[int, Field(ge=1)] = 1
    allocate: Literal["uniform", "sensitivity"] = "uniform"
    compensate: bool = True

    @property
    @abstractmethod
    def grain(self) -> int:
        """The count of a block's units that stay is a multiple of this."""

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        """The checkpoint with fewer units. Raises SourceError for an architecture that is not known, RecipeError for
        a share that leaves a block without units, BrokenCut where the proof fails."""
        module = copy.deepcopy(checkpoint.module)
        found = anatomy(module)
        before = sizes(module)
        totals = [site.units for site in found.of(self.kind_of_units)]
        error = 0.0
        kept = [list(range(units)) for units in totals]
        for step in range(1, self.steps + 1):
            share = self.keep ** (step / self.steps)
            counts = self.counts(totals, share)
            larger = copy.deepcopy(module)
            with torch.no_grad():
                chosen = self.step(module, context, counts)
            error = max(error, self.proof(larger, module, chosen, context))
            kept = [[old[index] for index in new] for old, new in zip(kept, chosen, strict=True)]
        agree(module)
        sites = anatomy(module).of(self.kind_of_units)
        made = structure(before, module, sites)
        name = f"prune.{self.kind_of_units}"
        config = self.model_dump(mode="json")
        record = Record(
            stage=name,
            config=config,
            key=hash_of(context.key, checkpoint.key, name, config, code_version(), context.calibrate.fingerprint),
            figures={"units": float(sum(map(len, kept))), "units before": float(sum(totals)), "proof": error},
            structure=made,
        )
        return checkpoint.after(record, module)

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Cut an empty module to the same sizes."""
        replay(module, record.structure)

    def counts(self, totals: Sequence[int], share: float) -> list[int]:
        """How many units of each block stay. Raises RecipeError where that is none."""
        counts = [min(round(units * share / self.grain) * self.grain, units) for units in totals]
        if min(counts) < 1:
            raise RecipeError(
                f"keep: {self.keep} of {min(totals)} units leaves none, in multiples of {self.grain}. Keep more, or "
                f"drop whole blocks (prune.layers)"
            )
        return counts

    def step(self, module: nn.Module, context: TorchContext, counts: Sequence[int]) -> list[list[int]]:
        """Cut down to these counts, block by block, in place; each sees what the cuts before it did. Gives the units
        that stay."""
        found, reference = anatomy(module), context.original.module
        batches = list(forward_batches(context.task, context.calibrate))
        kept = []
        old, new = start(reference, anatomy(reference), batches), start(module, found, batches)
        for index, count in enumerate(counts):
            site = found.sites[index][self.kind_of_units]
            original = anatomy(reference).sites[index][self.kind_of_units]
            kept.append(self.site(module, site, original, old, new, count))
            old.advance(index)
            new.advance(index)
        return kept

    def site(self, module: nn.Module, site: Site, original: Site, old: Passage, new: Passage, count: int) -> list[int]:
        """Cut one site, in place; gives the units that stay."""
        layer = module.get_submodule(site.consumer)
        weight = matrix(layer)
        fit = Fit.empty(weight.shape[1], weight.shape[0])
        for was, now in zip(old.see(original), new.see(site), strict=True):
            fit.add(now.x, was.total - now.residual)
        normal = Normal(layer, fit)
        if self.criterion is None:
            order: Sequence[int] = eliminate(normal, site.units, protected=count).order
        else:
            judge = registry.resolve("criterion", self.criterion)()
            order = by_score(judge.scores(Evidence(weight, fit.inputs)), site.units)
        kept = sorted(order[len(order) - count :])
        cut(module, site, kept)
        if self.compensate:
            put(layer, *normal.solve(columns(site, kept)))
        return kept

    def proof(
        self, larger: nn.Module, smaller: nn.Module, kept: Sequence[Sequence[int]], context: TorchContext
    ) -> float:
        """Cut a copy again, without compensation, and compare it with the model before. Raises BrokenCut."""
        sites = {
            site.consumer: (site, units)
            for site, units in zip(anatomy(larger).of(self.kind_of_units), kept, strict=True)
        }
        plain = copy.deepcopy(larger)
        for site, units in sites.values():
            cut(plain, site, units)
        return prove(larger, lambda: silenced(larger, sites), plain, context.task, context.calibrate)
