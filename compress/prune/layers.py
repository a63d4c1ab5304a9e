"""Fewer blocks in a transformer."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from compress.statistics.gram import forward_batches
from compress.transformer.anatomy import anatomy
from compress.transformer.proof import prove, skipped
from compress.transformer.refit_blocks import aim, settle
from compress.transformer.surgery import keep_blocks
from laconic.artifacts.record import Record
from laconic.errors import RecipeError
from laconic.hashing import code_version, hash_of
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import Property, TorchContext, TorchStage, dump_settings


class Layers(TorchStage):
    """Drop whole blocks.

    keep: the share of blocks that stay; one after another goes that which the answers suffer least without, at the
    cost of as many measurements as there are blocks for each. drop: which blocks go, counted from 0, if it is known.
    compensate: fit what is left, by least squares, to what the original has at the same place. samples: how many to
    look at for it.
    """

    lossy: ClassVar[bool] = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges", "factors"})

    keep: Annotated[float, Field(gt=0, le=1)] = 0.75
    drop: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    compensate: bool = True
    samples: Annotated[int, Field(ge=1)] = 1024

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        """The checkpoint with fewer blocks. Raises SourceError for an architecture that is not known, RecipeError
        where no block is left or a block is not there, PruningError where the proof fails."""
        context = replace(context, calibrate=context.calibrate.take(self.samples, context.seed))
        found = anatomy(checkpoint.module)
        count = len(found.sites)
        kept = self.named(count) if self.drop is not None else self.chosen(checkpoint, context, count)
        gone = [index for index in range(count) if index not in kept]
        module = without(checkpoint.module, kept)
        paths = [found.block(index) for index in gone]
        error = prove(
            checkpoint.module,
            lambda: skipped(checkpoint.module, paths),
            module,
            context.task,
            context.calibrate,
        )
        config = dump_settings(self)
        record = Record(
            stage="prune.layers",
            config=config,
            key=hash_of(
                context.key, checkpoint.key, "prune.layers", config, code_version(), context.calibrate.fingerprint
            ),
            figures={"blocks": float(len(kept)), "blocks before": float(count), "proof": error},
            structure={"blocks": kept},
        )
        if self.compensate and gone:
            original, blocks = aim(checkpoint, context)
            batches = list(forward_batches(context.task, context.calibrate))
            settle(module, original, [blocks[index] for index in kept], batches, ("heads", "ffn"))
        return checkpoint.after(record, module)

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Drop the same blocks of an empty module."""
        keep_blocks(module, record.structure["blocks"])

    def named(self, count: int) -> list[int]:
        """The blocks that stay when those of `drop` go."""
        gone = set(self.drop or ())
        if not gone <= set(range(count)) or len(gone) == count:
            raise RecipeError(
                f"drop: {sorted(gone)} of {count} blocks, which count from 0 to {count - 1}, and one of which must stay"
            )
        return [index for index in range(count) if index not in gone]

    def chosen(self, checkpoint: Checkpoint, context: TorchContext, count: int) -> list[int]:
        """The blocks that stay when those go without which the answers suffer least, one after another (after Men et
        al., ShortGPT, 2024, by the answers themselves)."""
        least = round(count * self.keep)
        if least < 1:
            raise RecipeError(f"keep: {self.keep} of {count} blocks leaves none. Keep at least {1 / count:.2g}")
        kept = list(range(count))
        while len(kept) > least:
            scores = {}
            for index in kept:
                left = [each for each in kept if each != index]
                smaller = replace(checkpoint, module=without(checkpoint.module, left))
                scores[index] = float(context.fidelity(smaller).mean())
            kept.remove(max(kept, key=lambda index: scores[index]))
        return kept


def without(module: nn.Module, kept: Sequence[int]) -> nn.Module:
    """A copy of a module, with these blocks only."""
    copied = copy.deepcopy(module)
    keep_blocks(copied, kept)
    return copied
