"""What is predicted of a step: its memory by category and part, and its cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from laconic.errors import RecipeError
from train.offload.memory_accounting import Category
from train.parallel.mesh import AxisSizes
from train.planner.memory_timeline import MemoryTimeline
from train.planner.step_cost import StepCost
from train.settings import Training

HEADROOM = 0.05
"""Share of the memory that is left free, for fragmentation of the allocator and for libraries."""
SAME_TIME = 1.03
"""Times within this factor count as equal: an exact combination is preferred, then one that clips the gradient as the
settings ask, then the one with the least memory."""


@dataclass(frozen=True)
class MemoryPrediction:
    """The predicted memory and cost of a training step.

    peak, host: peak memory of the device and of the host, in bytes. at_peak: the device's bytes by category at its
    peak. parts: the same at the peak of each part of the step, as `name_part` names it. cost: of one step, over all
    micro-batches. timeline: every allocation, where the whole depth was simulated.
    """

    peak: int
    host: int
    at_peak: Mapping[Category, int]
    parts: Mapping[str, Mapping[Category, int]]
    cost: StepCost
    timeline: MemoryTimeline | None = None

    @property
    def phases(self) -> dict[str, Mapping[Category, int]]:
        """The device's bytes by category at the peak of each phase."""
        phases: dict[str, Mapping[Category, int]] = {}
        for name, part in self.parts.items():
            phase = name.partition(" ")[0]
            phases[phase] = max(phases.get(phase, part), part, key=sum_categories)
        return phases

    @property
    def total(self) -> int:
        """Bytes of device and host: their peaks, which need not be at the same moment."""
        return self.peak + self.host

    @property
    def seconds(self) -> float:
        """Time of one step."""
        return self.cost.seconds()


def count_rows(training: Training, sizes: AxisSizes) -> int:
    """Count the rows of a step on one rank. Raises RecipeError where a rank would have none."""
    parts = sizes.replicate * sizes.shard
    if training.batch_size < parts:
        raise RecipeError(
            f"a batch of {training.batch_size} rows cannot be shared by {parts} ranks. Give each rank a row at least"
        )
    return ceil(training.batch_size / parts)


def sum_categories(part: Mapping[Category, int]) -> int:
    """Sum the bytes of all categories."""
    return sum(part.values())
