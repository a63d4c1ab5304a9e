"""Coverage of the verdict's intervals: how often they hold the truth, and how often a model that drops too much passes.

    python benchmarks/coverage.py [--simulations 400] [--metric NAME ...] [--plot FILE.svg]

Draws labelled test sets of 10 to 4,000 samples from a population whose change is known, for a metric of each kind:
right answers of balanced and of rare classes (an exact interval of discordant pairs), and entities, numbers, maps and
perplexity (a bootstrap). Prints Markdown tables of the least coverage over all drops, and of the share of models that
pass a limit of one point, or of 1 % of perplexity, and truly drop by that or more. Forty minutes on two cores; ten for
the metrics of right answers alone.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot
from numpy.random import Generator
from results import Results, make_parser

from export.validation.intervals import find_change_interval, find_mean_interval, measure_change
from laconic.arrays import Array
from laconic.metrics import Scorer, make_f1_scorer, make_mean_scorer, make_r2_scorer, make_ratio_scorer
from laconic.recipes.goal import MAX_DROP
from laconic.tasks.semantic_segmentation import make_iou_scorer

SAMPLES = (10, 20, 30, 50, 100, 200, 400, 1000, 4000)
DROPS = (0.0, 0.005, 0.01, 0.02, 0.05)
"""True drops, about: the population's own is computed."""
SHOWN = (100, 400, 1000, 4000)
"""Numbers of samples of the summary."""
POPULATION = 400_000
"""Samples that the true change is computed from."""

Pair = tuple[Scorer, Scorer]
"""The scorers of the original and of the artifact, on one test set."""


def draw_balanced(rng: Generator, samples: int, drop: float) -> Pair:
    """Right and wrong answers to classes of one size; one in fifty turns right or wrong beside the drop."""
    return draw_answers(rng, samples, lost=drop + 0.01, gained=0.01)


def draw_rare(rng: Generator, samples: int, drop: float) -> Pair:
    """Right and wrong answers, where the samples of one rare class are those that turn wrong."""
    return draw_answers(rng, samples, lost=drop, gained=0.0)


def draw_answers(rng: Generator, samples: int, lost: float, gained: float) -> Pair:
    """Answers of which so many turn wrong and right. lost, gained: shares of all samples."""
    kinds = rng.choice(3, samples, p=[lost, gained, 1 - lost - gained])
    right = rng.random(samples) < 0.9
    before = np.where(kinds == 0, True, np.where(kinds == 1, False, right))
    after = np.where(kinds == 0, False, np.where(kinds == 1, True, right))
    return make_mean_scorer(before.astype(np.float64)), make_mean_scorer(after.astype(np.float64))


def draw_entities(rng: Generator, samples: int, drop: float) -> Pair:
    """Entities, one in two texts, of which some are lost and some are found."""
    wanted, spurious = rng.poisson(0.5, samples), rng.poisson(0.05, samples)
    correct = rng.binomial(wanted, 0.9)
    kept = correct - rng.binomial(correct, 1.7 * drop + 0.005) + rng.binomial(wanted - correct, 0.02)
    sides = ((correct, correct + spurious), (kept, kept + spurious))
    before, after = (make_f1_scorer(right, found, wanted) for right, found in sides)
    return before, after


def draw_numbers(rng: Generator, samples: int, drop: float) -> Pair:
    """Numbers that are predicted with an error, to which the artifact adds one of heavy tails."""
    wanted = rng.normal(size=(samples, 1))
    found = wanted + rng.normal(0, 0.5, (samples, 1))
    noise = rng.standard_t(4, (samples, 1)) * (drop / 2) ** 0.5
    return make_r2_scorer(found, wanted), make_r2_scorer(found + noise, wanted)


def draw_maps(rng: Generator, samples: int, drop: float) -> Pair:
    """Maps of three classes, one of them in one image of ten, which the artifact misses more often."""
    sizes = np.stack([rng.integers(600, 900, samples), rng.integers(50, 300, samples), np.zeros(samples, int)], axis=1)
    sizes[:, 2] = np.where(rng.random(samples) < 0.1, rng.integers(20, 120, samples), 0)
    shared = np.floor(sizes * rng.uniform(0.7, 1.0, sizes.shape))
    lost = shared * (rng.random(sizes.shape) < [0, 0, 3 * drop]) + np.floor(shared * rng.uniform(0, 0.01, sizes.shape))
    before, after = (make_iou_scorer(each, 2 * sizes - each) for each in (shared, shared - lost))
    return before, after


def draw_perplexity(rng: Generator, samples: int, drop: float) -> Pair:
    """Texts of 1 to 63 tokens, whose log-likelihoods the artifact changes with heavy tails."""
    tokens = rng.geometric(0.05, samples).clip(max=63)
    before = -tokens * rng.gamma(4, 1.2, samples)
    after = before - drop * tokens + 0.06 * np.sqrt(tokens) * rng.standard_t(4, samples)
    return make_ratio_scorer(before, tokens), make_ratio_scorer(after, tokens)


METRICS: dict[str, Callable[[Generator, int, float], Pair]] = {
    "accuracy, balanced classes": draw_balanced,
    "accuracy, a rare class": draw_rare,
    "entity F1": draw_entities,
    "R2": draw_numbers,
    "mean IoU": draw_maps,
    "perplexity": draw_perplexity,
}
COUNTED = ("accuracy, balanced classes", "accuracy, a rare class")
"""Metrics whose interval takes no bootstrap, so that ten times as many simulations take less time."""


def draw_skewed_fidelity(rng: Generator, samples: int) -> Array:
    """Fidelities near 1 with a tail to lower ones, as quantization leaves."""
    return np.asarray(np.clip(1 - 0.005 * rng.lognormal(0, 1, samples), 0, 1))


def draw_broken_fidelity(rng: Generator, samples: int) -> Array:
    """Fidelities near 1, save those of one sample in two hundred, which is broken."""
    values = np.clip(1 - 0.005 * rng.lognormal(0, 0.5, samples), 0, 1)
    return np.where(rng.random(samples) < 0.005, 0.2, values)


FIDELITIES: dict[str, Callable[[Generator, int], Array]] = {
    "fidelity, skewed": draw_skewed_fidelity,
    "fidelity, one sample in 200 broken": draw_broken_fidelity,
}


@dataclass(frozen=True)
class Cell:
    """What came of the simulations of one metric, drop and number of samples.

    change: the true one. coverage: the share of intervals that hold it. passed: the share that lies above -MAX_DROP.
    """

    metric: str
    samples: int
    drop: float
    change: float
    coverage: float
    passed: float


def simulate(metric: str, samples: int, drop: float, simulations: int) -> Cell:
    """Draw test sets, and count the intervals that hold the true change, and those that pass."""
    draw = METRICS[metric]
    rng = np.random.default_rng([samples, round(1e4 * drop), len(metric)])
    change = measure_change(*draw(np.random.default_rng(0), POPULATION, drop), np.arange(POPULATION))
    count = simulations * (10 if metric in COUNTED else 1)
    intervals: Array = np.array([find_change_interval(*draw(rng, samples, drop), seed=seed) for seed in range(count)])
    low, high = intervals.T
    covered = (low <= change) & (change <= high)
    return Cell(metric, samples, drop, change, float(covered.mean()), float((low >= -MAX_DROP).mean()))


def run_cell(arguments: tuple[str, int, float], simulations: int) -> Cell:
    """Simulate one cell of the table."""
    return simulate(*arguments, simulations)


def print_table(cells: list[Cell], results: Results) -> None:
    """Print the least coverage, and the largest share of false passes, by metric and number of samples."""
    head = ["metric", "samples", "coverage, least", "false passes, most", "sound models that pass"]
    results.begin("by samples", head)
    for metric in dict.fromkeys(cell.metric for cell in cells):
        for samples in dict.fromkeys(cell.samples for cell in cells):
            own = [cell for cell in cells if (cell.metric, cell.samples) == (metric, samples)]
            false = max((cell.passed for cell in own if cell.drop >= MAX_DROP), default=0.0)
            sound = max(own, key=lambda cell: cell.change).passed
            least = min(cell.coverage for cell in own)
            shares = [f"{100 * least:.1f} %", f"{100 * false:.1f} %", f"{100 * sound:.0f} %"]
            results.add("by samples", [metric, f"{samples:,}", *shares])


def print_fidelities(simulations: int, results: Results) -> None:
    """Print how often the interval of a mean fidelity holds the truth."""
    shown = (30, *SHOWN)
    results.begin("fidelities", ["mean", *(f"{samples:,}" for samples in shown)])
    for name, draw in FIDELITIES.items():
        truth = float(draw(np.random.default_rng(0), 10 * POPULATION).mean())
        rng, shares = np.random.default_rng(1), []
        for samples in shown:
            intervals = [find_mean_interval(draw(rng, samples)) for _ in range(simulations)]
            shares.append(sum(low <= truth <= high for low, high in intervals) / simulations)
        results.add("fidelities", [name, *(f"{100 * share:.0f} %" for share in shares)])
    print()


def print_summary(cells: list[Cell], results: Results) -> None:
    """Print for each metric the least coverage and the most false passes over all numbers of samples, and the share of
    sound models that pass with SHOWN samples."""
    shown = [f"sound models that pass: {samples:,} samples" for samples in SHOWN]
    results.begin("summary", ["metric", "coverage, least", "false passes, most", *shown])
    for metric in dict.fromkeys(cell.metric for cell in cells):
        own = [cell for cell in cells if cell.metric == metric]
        false = max(cell.passed for cell in own if cell.drop >= MAX_DROP)
        by_samples = [[cell for cell in own if cell.samples == samples] for samples in SHOWN]
        sound = [f"{100 * max(each, key=lambda cell: cell.change).passed:.0f} %" for each in by_samples]
        least = min(cell.coverage for cell in own)
        results.add("summary", [metric, f"{100 * least:.1f} %", f"{100 * false:.1f} %", *sound])
    print()


def plot(cells: list[Cell], path: Path) -> None:
    """Plot the least coverage and the most false passes by the number of samples."""
    mpl.use("svg")
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharex=True)
    for metric in dict.fromkeys(cell.metric for cell in cells):
        own = [cell for cell in cells if cell.metric == metric]
        sizes = sorted({cell.samples for cell in own})
        least = [100 * min(cell.coverage for cell in own if cell.samples == size) for size in sizes]
        wrong = [[c.passed for c in own if c.samples == size and c.drop >= MAX_DROP] for size in sizes]
        axes[0].plot(sizes, least, marker="o", markersize=3, label=metric)
        axes[1].plot(sizes, [100 * max(each) for each in wrong], marker="o", markersize=3)
    axes[0].axhline(93, color="grey", linewidth=0.8, linestyle="--")
    axes[1].axhline(5, color="grey", linewidth=0.8, linestyle="--")
    axes[0].set(xscale="log", xlabel="test samples", ylabel="% of 95 % intervals that hold the truth", ylim=(85, 100.5))
    axes[1].set(xlabel="test samples", ylabel="% of models that drop by 1 point or more\nand pass", ylim=(0, 8))
    axes[0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    with mpl.rc_context({"svg.hashsalt": "coverage"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Simulate, print and plot."""
    parser = make_parser(__doc__)
    parser.add_argument("--simulations", type=int, default=400)
    parser.add_argument("--metric", action="append", choices=METRICS)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    jobs = [(metric, size, drop) for metric in arguments.metric or METRICS for size in SAMPLES for drop in DROPS]
    with multiprocessing.Pool() as pool:
        cells = pool.map(partial(run_cell, simulations=arguments.simulations), jobs, chunksize=1)
    print_summary(cells, results)
    print_fidelities(10 * arguments.simulations, results)
    print_table(cells, results)
    if arguments.plot:
        plot(cells, arguments.plot)


if __name__ == "__main__":
    main()
