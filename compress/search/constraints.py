"""The constraints of a search, and the quality of a candidate's outputs on the samples used for selection."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from export.validation.intervals import find_change_interval, measure_change
from laconic.arrays import Arrays
from laconic.data.dataset import Dataset
from laconic.errors import DataError, UsageError
from laconic.recipes.goal import MARGIN, Goal, find_max_drop, required_tolerance, tighten
from laconic.tasks.fidelity import make_finite, measure_divergence, measure_fidelity
from laconic.tasks.task import Task
from laconic.tasks.tolerance import Tolerance
from laconic.units import format_bytes, format_seconds

DOUBT_SHARE = 0.3
"""The share of the way from a measured drop to the upper end of its 95 % interval that is added to the drop: about one
standard error. Of 256 samples, one lost sample meets a limit of 1 %; two lost and one won do not."""

TIMING_NOISE = 0.05
"""The share of a latency limit that is reserved for timing noise."""


WRITING = ("max_divergence", "max_first_token", "min_tokens_per_second")
"""The parts of a goal that are for models that write."""


@dataclass(frozen=True)
class Quality:
    """Quality of a candidate's outputs on the samples used for selection.

    fidelity, worst: mean and minimum fidelity to the original's outputs. drop: of the task's metric; cautious_drop: the
    drop plus DOUBT_SHARE of the way to the upper end of its interval, which the constraints apply to. Both are None
    without labels. divergence: of models that write, the mean from the original's distributions, in nats.
    """

    fidelity: float
    worst: float
    drop: float | None = None
    cautious_drop: float | None = None
    divergence: float | None = None

    @property
    def loss(self) -> float:
        """What is lost: the divergence of models that write, the infidelity of others."""
        return 1 - self.fidelity if self.divergence is None else self.divergence


class Costs(Protocol):
    """What one use of a model costs, measured or predicted.

    latency: seconds for one sample. size: bytes. first_token: of models that write, seconds to the first token of a
    lone answer; tokens_per_second: of those behind it. Both are None for others.
    """

    @property
    def latency(self) -> float: ...
    @property
    def size(self) -> float: ...
    @property
    def first_token(self) -> float | None: ...
    @property
    def tokens_per_second(self) -> float | None: ...


def measure_quality(task: Task, reference: Arrays, outputs: Arrays, dataset: Dataset, seed: int) -> Quality:
    """Compare outputs for a dataset with the original's, `reference`. seed: of the bootstrap."""
    fidelity = measure_fidelity(task, reference, outputs)
    mean, worst = float(fidelity.mean()), float(fidelity.min())
    divergence = float(measure_divergence(task, reference, outputs).mean()) if task.measures_perplexity else None
    labels = task.label_samples(dataset.samples, dataset.labels)
    if labels is None:
        return Quality(mean, worst, divergence=divergence)
    before, after = (task.scorer(finite, labels) for finite in make_finite(reference, outputs)[:2])
    low, _ = find_change_interval(before, after, per_row=dataset.per_row, seed=seed)
    drop = -measure_change(before, after, np.arange(len(fidelity)))
    return Quality(mean, worst, drop, drop + DOUBT_SHARE * (-low - drop), divergence)


@dataclass(frozen=True)
class Constraints:
    """The constraints that a candidate must satisfy.

    tolerance: the required fidelity, tightened; None where only the drop is constrained. max_drop, max_latency
    (seconds, less the share reserved for noise), max_size (bytes): None where unconstrained. prefers_speed: whether, of
    two candidates that meet the goal, the faster is better; where only costs are constrained, the one that loses less
    is. strict: whether what the samples of the verdict leave in doubt counts as missed. Of models that write,
    max_divergence (nats, tightened), and with the margin for noise max_first_token (seconds), min_tokens_per_second.
    """

    tolerance: Tolerance | None
    max_drop: float | None
    max_latency: float | None
    max_size: float | None
    prefers_speed: bool = True
    strict: bool = False
    max_divergence: float | None = None
    max_first_token: float | None = None
    min_tokens_per_second: float | None = None

    @classmethod
    def from_goal(cls, goal: Goal, task: Task, choose: Dataset) -> "Constraints":
        """Derive the constraints from a goal. Raises DataError for a maximum drop without labels to measure it,
        UsageError for what only models that write can meet."""
        for key in WRITING:
            if getattr(goal, key) is not None and not task.measures_perplexity:
                raise UsageError(
                    f"goal.{key} is for models that write, and the task is {task.name}. Limit the fidelity, max_drop, "
                    f"max_latency or max_size"
                )
        has_metric = task.label_samples(choose.samples, choose.labels) is not None
        if goal.max_drop is not None and not has_metric:
            raise DataError(
                "max_drop is a drop of the metric against labels, and the samples have none. "
                'Give --data rows with a "label", or ask for a --fidelity'
            )
        counts = goal.max_drop is None or goal.fidelity is not None
        tolerance = tighten(required_tolerance(task, goal)) if counts else None
        divergence, rate = goal.max_divergence, goal.min_tokens_per_second
        costs = (goal.max_latency, goal.max_size, goal.max_first_token, rate)
        return cls(
            tolerance,
            max_drop=find_max_drop(goal) if has_metric else None,
            max_latency=leave_margin(goal.max_latency),
            max_size=goal.max_size,
            prefers_speed=goal.max_drop is not None or costs == (None,) * len(costs),
            max_divergence=None if divergence is None else MARGIN * divergence,
            max_first_token=leave_margin(goal.max_first_token),
            min_tokens_per_second=None if rate is None else rate / (1 - TIMING_NOISE),
        )

    def shortfall(self, quality: Quality) -> float:
        """Return the largest ratio of a loss of quality to the allowed one; at most 1 where the goal is met."""
        ratios = [0.0]
        if self.tolerance is not None:
            ratios.append(ratio(1 - quality.fidelity, 1 - self.tolerance.mean))
            if self.tolerance.worst is not None:
                ratios.append(ratio(1 - quality.worst, 1 - self.tolerance.worst))
        if self.max_divergence is not None and quality.divergence is not None:
            ratios.append(ratio(quality.divergence, self.max_divergence))
        if self.max_drop is not None and quality.cautious_drop is not None:
            ratios.append(ratio(quality.cautious_drop, self.max_drop))
        return max(ratios)

    def excess(self, costs: Costs) -> float:
        """Return the largest ratio of a cost to its limit; at most 1 where all are met."""
        pairs = [
            (costs.latency, self.max_latency),
            (costs.size, self.max_size),
            (costs.first_token, self.max_first_token),
            (self.min_tokens_per_second, costs.tokens_per_second),
        ]
        return max((ratio(cost, limit) for cost, limit in pairs if cost is not None and limit is not None), default=0.0)

    def describe_excess(self, costs: Costs, word: str = "") -> str:
        """Describe the limits that costs exceed; empty where they exceed none. word: before each figure."""
        parts = []
        if self.max_latency is not None and costs.latency > self.max_latency:
            parts.append(f"{word}{format_seconds(costs.latency)}, the goal is {format_seconds(self.max_latency)}")
        if self.max_size is not None and costs.size > self.max_size:
            parts.append(f"{word}{format_bytes(costs.size)}, the goal is {format_bytes(self.max_size)}")
        first, most = costs.first_token, self.max_first_token
        if first is not None and most is not None and first > most:
            parts.append(f"{word}{format_seconds(first)} to the first token, asked for {format_seconds(most)}")
        rate, least = costs.tokens_per_second, self.min_tokens_per_second
        if rate is not None and least is not None and rate < least:
            parts.append(f"{word}{rate:.1f} tokens/s, asked for {least:.1f}")
        return "; ".join(parts)

    def describe_infidelity(self, quality: Quality | None) -> str:
        """Describe the quality that is missing; empty where the constraints are met, and before the first trial."""
        if quality is None or self.shortfall(quality) <= 1:
            return ""
        limit, drop = self.max_drop, quality.cautious_drop
        if limit is not None and quality.drop is not None and drop is not None and drop > limit:
            return f"drop {quality.drop:.2%}, {drop:.2%} with the margin for its uncertainty, the goal is {limit:.2%}"
        most, divergence = self.max_divergence, quality.divergence
        if most is not None and divergence is not None and divergence > most:
            return f"divergence {divergence:.3g} nats, asked for {most:.3g}"
        assert self.tolerance is not None
        asked = self.tolerance.describe()
        return f"fidelity {quality.fidelity:.4f}, worst {quality.worst:.4f}, asked for {asked}"


def leave_margin(limit: float | None) -> float | None:
    """Return a limit of seconds less the share that is reserved for noise."""
    return None if limit is None else (1 - TIMING_NOISE) * limit


def ratio(loss: float, allowed: float) -> float:
    """Return a loss as a multiple of the allowed one; infinite where there is a loss and nothing is allowed."""
    if loss <= 0:
        return 0.0
    return loss / allowed if allowed > 0 else float("inf")
