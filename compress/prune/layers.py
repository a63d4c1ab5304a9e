"""Layer (depth) pruning: fewer blocks in a transformer."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from compress.prune.block_angles import find_redundant_run
from compress.statistics.layer_inputs import forward_batches
from compress.transformer.proof import prove, skip_blocks
from compress.transformer.refit_blocks import find_target, refit_blocks
from compress.transformer.surgery import BLOCKS, keep_blocks
from laconic.artifacts.record import Record
from laconic.errors import RecipeError
from laconic.models.anatomy import anatomy
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import Property, TorchContext, TorchStage


class Layers(TorchStage):
    """Remove whole blocks.

    keep: the share of blocks that stays. criterion: with `fidelity`, blocks are removed one after another, each time
    the one without which the fidelity is highest, at the cost of one measurement per remaining block; with `angle`,
    neighbouring blocks that turn the hidden states least, at the cost of one pass over the calibration samples. drop:
    the indices of the blocks to remove, from 0, if they are known. compensate: refit the remaining blocks, by least
    squares, to the original's activations. samples: how many calibration samples to use.
    """

    lossy: ClassVar[bool] = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges", "factors"})

    keep: Annotated[float, Field(gt=0, le=1)] = 0.75
    criterion: Literal["fidelity", "angle"] = "fidelity"
    drop: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    compensate: bool = True
    samples: Annotated[int, Field(ge=1)] = 1024

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        """Return the checkpoint with fewer blocks. Raises SourceError for an unknown architecture, RecipeError if no
        block would be left or a block does not exist, PruningError where the proof fails."""
        context = replace(context, calibrate=context.calibrate.take(self.samples, context.seed))
        blocks = anatomy(checkpoint.module)
        count = len(blocks.sites)
        kept = self.remaining(count) if self.drop is not None else self.select(checkpoint, context, count)
        gone = [index for index in range(count) if index not in kept]
        module = copy_with_blocks(checkpoint.module, kept)
        paths = [blocks.block(index) for index in gone]
        error = prove(
            checkpoint.module,
            lambda: skip_blocks(checkpoint.module, paths),
            module,
            context.task,
            context.calibrate,
        )
        figures = {"blocks": float(len(kept)), "blocks before": float(count), "proof": error}
        record = self.make_record("prune.layers", checkpoint, context, figures, {BLOCKS: kept})
        if self.compensate and gone:
            original, counterparts = find_target(checkpoint, context)
            batches = list(forward_batches(context.task, context.calibrate))
            refit_blocks(module, original, [counterparts[index] for index in kept], batches, ("heads", "ffn"))
        return checkpoint.after(record, module)

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Remove the same blocks from an empty module."""
        keep_blocks(module, record.structure[BLOCKS])

    def remaining(self, count: int) -> list[int]:
        """Return the blocks that stay when those of `drop` are removed. Raises RecipeError."""
        gone = set(self.drop or ())
        if not gone <= set(range(count)) or len(gone) == count:
            raise RecipeError(
                f"drop: {sorted(gone)} of {count} blocks, numbered from 0 to {count - 1}; one of them must stay"
            )
        return [index for index in range(count) if index not in gone]

    def select(self, checkpoint: Checkpoint, context: TorchContext, count: int) -> list[int]:
        """Return the blocks that stay, by the criterion. Raises RecipeError where none would."""
        least = round(count * self.keep)
        if least < 1:
            raise RecipeError(f"keep: {self.keep} of {count} blocks leaves none. Keep at least {1 / count:.2g}")
        kept = list(range(count))
        if self.criterion == "angle":
            first = find_redundant_run(checkpoint.module, context.task, context.calibrate, count - least)
            return kept[:first] + kept[first + count - least :]
        while len(kept) > least:
            scores = {}
            for index in kept:
                left = [other for other in kept if other != index]
                smaller = replace(checkpoint, module=copy_with_blocks(checkpoint.module, left))
                scores[index] = float(context.fidelity(smaller).mean())
            kept.remove(max(kept, key=lambda index: scores[index]))
        return kept


def copy_with_blocks(module: nn.Module, kept: Sequence[int]) -> nn.Module:
    """Return a copy of a module with these blocks only."""
    copied = copy.deepcopy(module)
    keep_blocks(copied, kept)
    return copied
