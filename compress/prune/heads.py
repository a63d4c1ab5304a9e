"""Attention head pruning in the blocks of a transformer."""

from typing import ClassVar

from compress.prune.unit_pruning import UnitPruning
from compress.transformer.anatomy import UnitKind


class Heads(UnitPruning):
    """Prune attention heads; of query heads that share keys and values, all or none."""

    units: ClassVar[UnitKind] = "heads"

    @property
    def multiple(self) -> int:
        return 1
