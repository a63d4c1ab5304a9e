"""Fewer attention heads in the blocks of a transformer."""

from typing import ClassVar

from compress.prune.transformer_units import Units
from compress.transformer.anatomy import Kind


class Heads(Units):
    """Cut attention heads; of heads that share their keys, all or none."""

    units: ClassVar[Kind] = "heads"

    @property
    def grain(self) -> int:
        return 1
