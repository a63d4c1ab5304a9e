"""What a candidate must reach on the samples that are chosen by, so that others will agree."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from laconic.data.dataset import Dataset
from laconic.errors import DataError
from laconic.metrics import bootstrap_interval
from laconic.recipes.goal import required_tolerance, tighten
from laconic.recipes.recipe import Goal
from laconic.tasks.task import Task, Tolerance
from laconic.tensor import Arrays

DOUBT = 0.5
"""The share of the way from a drop to the upper end of its 95 % interval that counts as lost too: about one standard
error. Of 256 samples, one that was lost passes for 1 %; two lost and one won do not."""

NOISE = 0.05
"""The share of a latency that is left for the clock, which never tells the same twice."""


@dataclass(frozen=True)
class Figures:
    """Of a candidate's answers. fidelity, worst: to the original's. drop: of the task's metric; doubtful: the drop that
    is counted with, the doubt included; both None without labels."""

    fidelity: float
    worst: float
    drop: float | None = None
    doubtful: float | None = None

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def figures(task: Task, reference: Arrays, found: Arrays, dataset: Dataset, seed: int) -> Figures:
    """Of these answers to a dataset. reference: the original's."""
    fidelity = task.fidelity(reference, found)
    mean, worst = float(fidelity.mean()), float(fidelity.min())
    if dataset.labels is None:
        return Figures(mean, worst)
    before, after = (task.scorer(each, dataset.labels) for each in (reference, found))
    _, high = bootstrap_interval(lambda index: before(index) - after(index), len(fidelity), seed=seed)
    every = np.arange(len(fidelity))
    drop = before(every) - after(every)
    return Figures(mean, worst, drop, drop + DOUBT * (high - drop))


@dataclass(frozen=True)
class Aim:
    """What to reach. tolerance: in fidelity, tightened; None where the drop alone counts. max_drop, max_latency,
    max_size: as a goal has them, but for a part of the latency that is left for noise. certain: whether a drop must be
    within its limit with its whole interval, on the samples that are judged by."""

    tolerance: Tolerance | None
    max_drop: float | None
    max_latency: float | None
    max_size: float | None
    certain: bool = False

    @classmethod
    def of(cls, goal: Goal, task: Task, choose: Dataset) -> "Aim":
        """Raises DataError for a drop that nothing can be measured by."""
        if goal.max_drop is not None and choose.labels is None:
            raise DataError(
                "max_drop is a drop of the metric against labels, and the samples have none. "
                'Give --data rows with a "label", or ask for a --fidelity'
            )
        counts = goal.max_drop is None or goal.fidelity is not None
        tolerance = tighten(required_tolerance(task, goal)) if counts else None
        latency = None if goal.max_latency is None else (1 - NOISE) * goal.max_latency
        return cls(tolerance, goal.max_drop, latency, goal.max_size)

    @property
    def speed(self) -> bool:
        """Whether faster is better once the goal is met; where only latency or size are bounded, more faithful is."""
        return self.max_drop is not None or (self.max_latency is None and self.max_size is None)

    def uncertain(self, highest: float | None) -> bool:
        """Whether a drop may be larger than allowed, by the upper end of its interval."""
        return self.max_drop is not None and highest is not None and highest > self.max_drop

    def shortfall(self, found: Figures) -> float:
        """How many times as far off as allowed the answers are; at most 1 where they meet the goal."""
        parts = [0.0]
        if self.tolerance is not None:
            parts.append(ratio(1 - found.fidelity, 1 - self.tolerance.mean))
            if self.tolerance.worst is not None:
                parts.append(ratio(1 - found.worst, 1 - self.tolerance.worst))
        if self.max_drop is not None:
            assert found.doubtful is not None
            parts.append(ratio(found.doubtful, self.max_drop))
        return max(parts)

    def excess(self, latency: float, size: float) -> float:
        """How many times as slow or large as allowed; at most 1 where neither is too much."""
        pairs = ((latency, self.max_latency), (size, self.max_size))
        return max((ratio(found, most) for found, most in pairs if most is not None), default=0.0)


def ratio(found: float, allowed: float) -> float:
    """How many times what is allowed; 0 for nothing of what is not allowed at all."""
    if found <= 0:
        return 0.0
    return found / allowed if allowed > 0 else float("inf")
