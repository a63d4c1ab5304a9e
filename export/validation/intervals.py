"""95 % confidence intervals of what a few samples say about all: shares, means, and changes of a metric.

What never happened in n samples may still happen in about 3 / n of all others (the rule of three; Hanley &
Lippman-Hand, JAMA 249, 1983). No interval here is narrower than that, so that a change of a metric cannot be known to
one point from less than some 370 samples. benchmarks/coverage.py measures how often each interval holds the truth.
"""

from functools import partial

import numpy as np
from scipy import stats

from laconic.arrays import Array
from laconic.artifacts.verdict import FEW
from laconic.metrics import Scorer

CONFIDENCE = 0.95
ROUNDS = 1000
"""Resamples of the bootstrap."""

Interval = tuple[float, float]


def find_unseen_share(samples: float) -> float:
    """The largest share of all samples that something may concern which happened in none of so many."""
    return float(1 - ((1 - CONFIDENCE) / 2) ** (1 / samples)) if samples >= 1 else 1.0


def find_share_interval(count: int, samples: int, confidence: float = CONFIDENCE) -> Interval:
    """The exact interval of a share (Clopper & Pearson, Biometrika 26, 1934). count: in how many samples."""
    interval = stats.binomtest(count, samples).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)


def find_mean_interval(values: Array) -> Interval:
    """The interval of a mean of values up to 1, by Student's t. values: [samples].

    What no sample showed is taken to be as low as the lowest one; as 0 where there are few.
    """
    mean, count = float(values.mean()), len(values)
    half = 1.0 if count == 1 else float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * stats.sem(values))
    unseen = find_unseen_share(count) * (mean - (float(values.min()) if count >= FEW else 0.0))
    return mean - max(half, unseen), min(mean + half, 1.0)


def find_change_interval(before: Scorer, after: Scorer, *, per_row: int = 1, seed: int = 0) -> Interval:
    """The interval of the change of a metric, on the same samples before and after.

    per_row: adjacent samples that belong together, and are one observation. seed: of the bootstrap, which takes the
    interval of all metrics but shares of right answers.
    """
    if per_row == 1 and before.values is not None and after.values is not None:
        was, now = before.values, after.values
        if before.is_bounded and set(np.unique([was, now])) <= {0.0, 1.0}:
            return find_paired_share_interval(int((now > was).sum()), int((was > now).sum()), len(was))
    rows = before.weights.shape[1] // per_row
    change = partial(measure_change, before, after)
    found = change(np.arange(rows * per_row))
    rng = np.random.default_rng(seed)
    offsets = np.arange(per_row)
    draws = [change((rng.integers(0, rows, rows)[:, None] * per_row + offsets).ravel()) for _ in range(ROUNDS)]
    low, high = np.percentile(draws, [100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2])
    unseen = max(find_unseen_change(before, per_row), find_unseen_change(after, per_row))
    if not before.is_bounded:
        unseen *= measure_largest_change(before, after)
    return float(found - np.hypot(found - low, unseen)), float(found + np.hypot(high - found, unseen))


def measure_change(before: Scorer, after: Scorer, index: Array) -> float:
    """The change of a metric over some samples."""
    return after(index) - before(index)


def measure_largest_change(before: Scorer, after: Scorer) -> float:
    """The largest change by a sample, by the share that it has in an unbounded metric: what no sample showed is taken
    to change it by no more."""
    assert before.values is not None
    assert after.values is not None
    return float(np.abs(after.values - before.values).max())


def find_paired_share_interval(gained: int, lost: int, samples: int) -> Interval:
    """The interval of the change of a share of right answers: the samples that turned right less those that turned
    wrong, per sample.

    The exact intervals of both shares are joined by the squares of their distances, with the correlation that two
    outcomes of one draw have (Newcombe, Statistics in Medicine 17, 1998; Zou & Donner, ibid. 27, 2008).
    """
    up, down = gained / samples, lost / samples
    up_low, up_high = find_share_interval(gained, samples)
    down_low, down_high = find_share_interval(lost, samples)
    correlation = -np.sqrt(up * down / ((1 - up) * (1 - down))) if 0 < up < 1 and 0 < down < 1 else 0.0

    def join(one: float, other: float) -> float:
        return float(np.sqrt(one**2 + other**2 - 2 * correlation * one * other))

    change = up - down
    low = change - join(up - up_low, down_high - down)
    return max(low, -1.0), min(change + join(up_high - up, down - down_low), 1.0)


def find_unseen_change(scorer: Scorer, per_row: int = 1) -> float:
    """The largest change of a metric by what no sample shows: the rule of three in each part of the metric, by the
    number of samples that bear on it (Kish, Survey Sampling, 1965)."""
    weights = scorer.weights.astype(np.float64).reshape(len(scorer.weights), -1, per_row).sum(axis=-1)
    if not weights.size or not weights.any():
        return 1.0
    counts = weights.sum(axis=1) ** 2 / np.maximum(np.square(weights).sum(axis=1), 1e-12)
    return max(find_unseen_share(float(count)) for count in counts) / len(weights)


def count_needed_samples(
    interval: Interval, figure: float, required: float, samples: int, spread: float = 1.0
) -> int | None:
    """About how many samples would tell whether a figure is at least what is required, to two digits; None where it is
    so near that no number would.

    spread: how far from the figure what no sample showed may be. The part of the interval that stands for it narrows as
    the number of samples, the rest as its root.
    """
    low, high = interval
    distance, half = abs(figure - required), (figure - low if figure >= required else high - figure)
    if distance * 100 < half:
        return None
    unseen = -np.log((1 - CONFIDENCE) / 2) / samples * spread
    seen = max(half**2 - unseen**2, 0.0)
    # Where the squares of both parts add up to the square of the distance: a quadratic equation for the factor.
    factor = (seen + np.sqrt(seen**2 + 4 * (unseen * distance) ** 2)) / (2 * distance**2)
    needed = max(samples * float(factor), samples + 1)
    digits = 10 ** max(int(np.log10(needed)) - 1, 0)
    return int(np.ceil(needed / digits) * digits)
