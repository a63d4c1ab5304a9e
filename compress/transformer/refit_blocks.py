"""Cut the blocks of a model one after another, and fit each to what the original has at the same place.

Each block sees what the cuts before it did, and makes up for it as far as it can, so that errors do not pile up.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from compress.statistics.gram import matrix
from compress.transformer.anatomy import Anatomy, Kind, Site, anatomy
from compress.transformer.blockwise import Passage
from compress.transformer.elimination import Sums, bias_of, put, refit
from compress.transformer.surgery import columns, cut
from laconic.artifacts.record import Record
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import TorchContext


class Choose(Protocol):
    """Which units of a site stay, in their order."""

    def __call__(self, site: Site, weight: Tensor, sums: Sums, *, biased: bool) -> Sequence[int]:
        """weight: of the consumer, [out, in]; biased: whether it has a bias. sums: over all samples."""
        ...


def settle(
    module: nn.Module,
    original: nn.Module,
    counterparts: Sequence[int],
    batches: Sequence[Mapping[str, Tensor]],
    kinds: Sequence[Kind],
    choose: Choose | None = None,
    *,
    compensate: bool = True,
) -> dict[str, list[int]]:
    """Cut the sites of these kinds in every block, in place, and fit the layers where their units meet.

    counterparts: for each block, the block of the original whose answer it is to give. choose: which units stay;
    all, where it is not given. Gives the units that stay, by the consumer's path.
    """
    kept: dict[str, list[int]] = {}
    found, reference = anatomy(module), anatomy(original)
    with torch.no_grad():
        old = Passage(original, reference, batches, changes=False)
        new = Passage(module, found, batches, changes=True)
        stands = 0
        for index, sites in enumerate(found.sites):
            while stands < counterparts[index]:
                old.advance(stands)
                stands += 1
            for kind in kinds:
                site = sites[kind]
                layer = module.get_submodule(site.consumer)
                weight, biased = matrix(layer).detach().clone(), bias_of(layer) is not None
                halves = sums(layer, old, reference.sites[stands][kind], new, site)
                chosen = list(range(site.units))
                if choose is not None:
                    chosen = list(choose(site, weight, halves[0] + halves[1], biased=biased))
                kept[site.consumer] = chosen
                if len(chosen) < site.units:
                    cut(module, site, chosen)
                if compensate:
                    put(layer, *refit(weight, biased, halves, columns(site, chosen)))
            new.advance(index)
    return kept


def sums(layer: nn.Module, old: Passage, original: Site, new: Passage, site: Site) -> tuple[Sums, Sums]:
    """Of what goes into a consumer, and of what should come out for the residual stream to become the original's; of
    every other batch each."""
    halves = Sums.empty(layer), Sums.empty(layer)
    for number, (was, now) in enumerate(zip(old.see(original), new.see(site), strict=True)):
        halves[number % 2].add(now.x, was.total - now.residual)
    return halves


def counterparts(history: Iterable[Record], count: int) -> list[int]:
    """Which of the original's `count` blocks each block was, after a history in which some were dropped."""
    kept = list(range(count))
    for record in history:
        if "blocks" in record.structure:
            kept = [kept[index] for index in record.structure["blocks"]]
    return kept


def aim(checkpoint: Checkpoint, context: TorchContext) -> tuple[nn.Module, list[int]]:
    """The model whose hidden states are aimed at, and its counterpart of each block: the original's, or, where they
    are of another kind, those of the checkpoint itself."""
    module, original = checkpoint.module, context.original.module
    mine, theirs = anatomy(module), anatomy(original)
    blocks = counterparts(checkpoint.history, len(theirs.sites))
    if len(blocks) == len(mine.sites) and width(module, mine) == width(original, theirs):
        return original, blocks
    return module, list(range(len(mine.sites)))


def width(module: nn.Module, found: Anatomy) -> int:
    """Of the hidden states."""
    return len(matrix(module.get_submodule(found.sites[0]["ffn"].consumer)))
