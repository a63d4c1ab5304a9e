"""Fewer feed-forward units in the blocks of a transformer."""

from typing import Annotated, ClassVar

from pydantic import Field

from compress.anatomy import Kind
from compress.prune.units import Units


class Ffn(Units):
    """Cut feed-forward units. multiple: the width that stays is a multiple of this, as kernels like it."""

    units: ClassVar[Kind] = "ffn"

    multiple: Annotated[int, Field(ge=1)] = 32

    @property
    def grain(self) -> int:
        return self.multiple
