"""Fewer attention heads in the blocks of a transformer."""

from typing import ClassVar

from compress.anatomy import Kind
from compress.prune.units import Units


class Heads(Units):
    """Cut attention heads; of heads that share their keys, all or none."""

    units: ClassVar[Kind] = "heads"

    @property
    def grain(self) -> int:
        return 1
