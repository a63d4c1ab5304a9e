"""Gradient accumulation: a batch is processed in micro-batches whose gradients are summed."""

from collections.abc import Sequence

import torch
from pydantic import Field

from laconic.errors import RecipeError
from train.step.step_parts import StepParts
from train.step.technique import Proposal, Technique


class GradientAccumulation(Technique):
    """Splits a batch into micro-batches of `rows` rows. Activations of one micro-batch are held at a time; the
    optimizer steps after the last.

    Exact, except for batch normalization, which normalizes each micro-batch by itself.
    """

    slot = "batch"
    exact = True
    takes_parts_of_layers = True

    rows: int = Field(default=1, ge=1)

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return (Proposal("grid", {"rows": max(1, batch // 8)}),)

    @property
    def redraws_dropout(self) -> bool:
        return True

    @property
    def micro_batch(self) -> int:
        return self.rows

    def apply(self, parts: StepParts) -> None:
        if not parts.objective.splittable:
            raise RecipeError(
                "gradient-accumulation: this task compares the rows of a batch with one another, so a batch cannot be "
                "split into micro-batches. Remove it, and use a smaller batch or gradient-checkpointing"
            )
        parts.accumulate_gradients(self.rows)
