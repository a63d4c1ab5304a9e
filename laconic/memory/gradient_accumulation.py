"""A batch in parts, whose gradients add up."""

from typing import ClassVar

from pydantic import Field

from laconic.errors import RecipeError
from laconic.training.step.step_parts import StepParts
from laconic.training.step.technique import Slot, Technique


class Accumulate(Technique):
    """Activations of `rows` rows at a time; gradients of all parameters wait for the last.

    Exact, but for batch normalisation, which normalises each part by itself.
    """

    slot: ClassVar[Slot] = "batch"
    exact: ClassVar[bool] = True

    rows: int = Field(default=1, ge=1)

    def apply(self, parts: StepParts) -> None:
        if not parts.objective.splittable:
            raise RecipeError(
                "accumulate: this task compares the rows of a batch with one another, so a batch cannot be taken in "
                "parts. Remove accumulate, and take a smaller batch or checkpoint"
            )
        parts.accumulate_gradients(self.rows)
