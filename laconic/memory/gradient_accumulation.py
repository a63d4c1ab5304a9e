"""A batch in parts, whose gradients add up."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field

from laconic.errors import RecipeError
from laconic.training.step.parts import Kit
from laconic.training.step.technique import Proposal, Slot, Technique


class Accumulate(Technique):
    """Activations of `rows` rows at a time; gradients of all parameters wait for the last.

    Exact, but for batch normalisation, which normalises each part by itself.
    """

    slot: ClassVar[Slot] = "batch"
    exact: ClassVar[bool] = True

    rows: int = Field(default=1, ge=1)

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return (Proposal("grid", {"rows": max(1, batch // 8)}),)

    @property
    def micro_batch(self) -> int:
        return self.rows

    def apply(self, kit: Kit) -> None:
        if not kit.objective.splits:
            raise RecipeError(
                "accumulate: this task compares the rows of a batch with one another, so a batch cannot be taken in "
                "parts. Remove accumulate, and take a smaller batch or checkpoint"
            )
        kit.rows = self.rows
