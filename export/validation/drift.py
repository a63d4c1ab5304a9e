"""Drift: how far a model's answers are from the original's, on samples that no choice was made by."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from export.validation.figures import describe_tolerance, round_figure, round_interval
from export.validation.intervals import (
    Interval,
    count_needed_samples,
    find_change_interval,
    find_mean_interval,
)
from laconic.arrays import Array, Arrays
from laconic.artifacts.verdict import FEW, Comparison
from laconic.tasks.answer_comparison import AnswerComparison
from laconic.tasks.fidelity import make_finite, measure_fidelity
from laconic.tasks.tolerance import Tolerance

LARGEST = 700.0
"""The largest exponent: of a larger one the exponential is no float."""

KIND_SAMPLES = 10
"""The fewest samples of a kind that are compared on their own."""


def compare_outputs(
    task: AnswerComparison,
    reference: Arrays,
    candidate: Arrays,
    labels: Sequence[Any] | None,
    *,
    tolerance: Tolerance,
    max_drop: float,
    per_row: int = 1,
    seed: int = 0,
) -> Comparison:
    """Compare two models' answers to the same samples with each other, and with labels where there are any.

    reference, candidate: [samples, ...] by name. tolerance: the required fidelity. max_drop: the largest decrease of
    the metric, which the whole interval of its change must keep to. per_row: adjacent samples that are one observation.
    seed: of the bootstrap.
    """
    fidelity = measure_fidelity(task, reference, candidate)
    rows = fidelity.reshape(-1, per_row).mean(axis=1)
    figures = summarize_fidelity(fidelity)
    intervals: dict[str, Interval] = {}
    if len(rows) < FEW or np.ptp(rows):
        intervals["fidelity"] = find_mean_interval(rows)
    required = describe_tolerance(tolerance)
    if labels is not None:
        before, after = (task.scorer(outputs, labels) for outputs in make_finite(reference, candidate)[:2])
        was, now = (scorer(np.arange(len(fidelity))) for scorer in (before, after))
        figures |= {"metric_original": was, "metric": now, "metric_change": now - was}
        intervals["metric_change"] = find_change_interval(before, after, per_row=per_row, seed=seed)
        required["metric_change"] = -max_drop
        if task.measures_perplexity:
            low, high = intervals["metric_change"]
            figures |= {"perplexity_original": find_perplexity(was), "perplexity": find_perplexity(now)}
            figures["perplexity_ratio"] = find_perplexity(now - was)
            intervals["perplexity_ratio"] = find_perplexity(high), find_perplexity(low)
    comparison = Comparison(
        subject="artifact",
        against="original",
        samples=len(rows),
        figures={name: round_figure(value) for name, value in figures.items()},
        intervals={name: round_interval(interval) for name, interval in intervals.items()},
        required=required,
    )
    return comparison.model_copy(update={"needed": dict(list_needed(comparison))})


def find_perplexity(log_likelihood: float) -> float:
    """The perplexity of a mean log-likelihood of a token; of a change of it, the ratio of perplexities."""
    return math.exp(min(-log_likelihood, LARGEST))


def list_needed(comparison: Comparison) -> Iterator[tuple[str, int]]:
    """Yield for each figure in doubt about how many samples would tell."""
    for name, least in comparison.required.items():
        if name in comparison.intervals and comparison.judge(name) == "inconclusive":
            spread = 1.0
            if name == "fidelity" and comparison.samples >= FEW:
                spread = comparison.figures["fidelity"] - comparison.figures["fidelity_worst"]
            interval, figure = comparison.intervals[name], comparison.figures[name]
            needed = count_needed_samples(interval, figure, least, comparison.samples, spread)
            if needed is not None:
                yield name, max(needed, FEW)


def compare_by_kind(fidelity: Array, kinds: Sequence[str], against: str = "original") -> Iterator[Comparison]:
    """Compare the artifact with the original on each kind of test sample that has at least KIND_SAMPLES.

    fidelity: [samples]. kinds: of each sample; empty where none has one. against: the name of the original.
    """
    names = np.array(kinds)
    for kind in sorted(set(kinds)):
        own = fidelity[names == kind]
        if len(own) >= KIND_SAMPLES:
            yield Comparison(
                subject=f"artifact on {kind!r}" if kind else "artifact on the other samples",
                against=against,
                samples=len(own),
                figures={name: round_figure(value) for name, value in summarize_fidelity(own).items()},
            )


def summarize_fidelity(fidelity: Array) -> dict[str, float]:
    """The mean, the 5th percentile and the lowest of a fidelity, [samples]."""
    return {
        "fidelity": float(fidelity.mean()),
        "fidelity_p5": float(np.quantile(fidelity, 0.05)),
        "fidelity_worst": float(fidelity.min()),
    }
