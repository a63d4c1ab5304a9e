"""FFN pruning: fewer units in the feed-forward layers of a transformer."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from compress.prune.unit_pruning import UnitPruning
from compress.transformer.anatomy import UnitKind


class Ffn(UnitPruning):
    """Prune FFN units. round_to: the width that stays is a multiple of this, for the hardware's kernels."""

    units: ClassVar[UnitKind] = "ffn"
    renamed: ClassVar[Mapping[str, str]] = {"multiple": "round_to"}

    round_to: Annotated[int, Field(ge=1)] = 32

    @property
    def multiple(self) -> int:
        return self.round_to
