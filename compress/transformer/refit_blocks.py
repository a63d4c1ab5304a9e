"""Prune the blocks of a model one after another, and refit each to the original's activations at the same place.

Each block sees the effect of the cuts before it and compensates for it, so that errors do not accumulate.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from compress.statistics.layer_weights import get_bias, weight_matrix, write_weight
from compress.statistics.least_squares import RegressionSums, refit_cross_validated
from compress.transformer.blockwise import BlockwisePass
from compress.transformer.surgery import BLOCKS, consumer_columns, keep_units
from laconic.artifacts.record import Record
from laconic.models.anatomy import Anatomy, Site, UnitKind, anatomy
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import TorchContext


class SelectUnits(Protocol):
    """Chooses the units of a site that stay, in ascending order."""

    def __call__(self, site: Site, weight: Tensor, sums: RegressionSums, *, biased: bool) -> Sequence[int]:
        """weight: of the consumer, [out, in]; biased: whether it has a bias. sums: over all samples."""
        ...


def refit_blocks(
    module: nn.Module,
    original: nn.Module,
    counterparts: Sequence[int],
    batches: Sequence[Mapping[str, Tensor]],
    kinds: Sequence[UnitKind],
    select: SelectUnits | None = None,
    *,
    compensate: bool = True,
) -> dict[str, list[int]]:
    """Prune the sites of these kinds in every block, in place, and refit the layers that consume their units.

    counterparts: for each block, the index of the original's block whose output is the target. select: chooses the
    units that stay; default: all. Returns the units that stay, by the consumer's path.
    """
    kept: dict[str, list[int]] = {}
    blocks, reference = anatomy(module), anatomy(original)
    with torch.no_grad():
        old = BlockwisePass(original, reference, batches, changes=False)
        new = BlockwisePass(module, blocks, batches, changes=True)
        position = 0
        for index, sites in enumerate(blocks.sites):
            while position < counterparts[index]:
                old.advance(position)
                position += 1
            for kind in kinds:
                if kind not in sites:
                    continue
                site = sites[kind]
                layer = module.get_submodule(site.consumer)
                weight, biased = weight_matrix(layer).detach().clone(), get_bias(layer) is not None
                halves = collect_halves(layer, old, reference.sites[position][kind], new, site)
                chosen = list(range(site.units))
                if select is not None:
                    chosen = list(select(site, weight, halves[0] + halves[1], biased=biased))
                kept[site.consumer] = chosen
                if len(chosen) < site.units:
                    keep_units(module, site, chosen)
                if compensate:
                    write_weight(layer, *refit_cross_validated(weight, biased, halves, consumer_columns(site, chosen)))
            new.advance(index)
    return kept


def collect_halves(
    layer: nn.Module, old: BlockwisePass, original: Site, new: BlockwisePass, site: Site
) -> tuple[RegressionSums, RegressionSums]:
    """Return the regression sums of a consumer, of every other batch each. The target is the output with which the
    residual stream becomes the original's."""
    halves = RegressionSums.zeros(layer), RegressionSums.zeros(layer)
    for number, (was, now) in enumerate(zip(old.observe(original), new.observe(site), strict=True)):
        halves[number % 2].add(now.x, was.total - now.residual)
    return halves


def find_counterparts(history: Iterable[Record], count: int) -> list[int]:
    """Return the index that each block had among the original's `count` blocks, after a history in which some were
    removed."""
    kept = list(range(count))
    for record in history:
        stayed = record.structure.get(BLOCKS, range(len(kept)))
        kept = [kept[index] for index in stayed if index < len(kept)]
    return kept


def find_target(checkpoint: Checkpoint, context: TorchContext) -> tuple[nn.Module, list[int]]:
    """Return the model whose hidden states are the target, and its counterpart of each block: the original, or the
    checkpoint itself where the original has other blocks or another width."""
    module, original = checkpoint.module, context.original.module
    mine, theirs = anatomy(module), anatomy(original)
    counterparts = find_counterparts(checkpoint.history, len(theirs.sites))
    alike = [hidden_widths(model, blocks) for model, blocks in ((module, mine), (original, theirs))]
    if len(counterparts) == len(mine.sites) and alike[0] == [alike[1][index] for index in counterparts]:
        return original, counterparts
    return module, list(range(len(mine.sites)))


def hidden_widths(module: nn.Module, blocks: Anatomy) -> list[int]:
    """Return the width of the hidden states in each block."""
    consumers = [next(iter(sites.values())).consumer for sites in blocks.sites]
    return [len(weight_matrix(module.get_submodule(path))) for path in consumers]
