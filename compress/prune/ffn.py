"""Fewer feed-forward units in the blocks of a transformer."""

from typing import Annotated, ClassVar

from pydantic import Field

from compress.prune.transformer_units import Units
from compress.transformer.anatomy import Kind


class Ffn(Units):
    """Cut feed-forward units. multiple: the width that stays is a multiple of this, as kernels like it."""

    units: ClassVar[Kind] = "ffn"

    multiple: Annotated[int, Field(ge=1)] = 32

    @property
    def grain(self) -> int:
        return self.multiple
