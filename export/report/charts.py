"""Plots of the report: SVG that inherits its colours and fonts from the page.

The same figures give the same bytes: ids come from a fixed salt, and no date is included.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from laconic.artifacts.ledger import SIZES, StageEntry
from laconic.timing.measurements import ORIGINAL, Timing, TrialRecord

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

# Placeholder colours, replaced by the page's CSS variables, which differ between light and dark mode.
INK, MUTED, LINE, BEFORE, AFTER, BYTES, WORK, FP8, FP16, BF16 = (f"#0000{number:02}" for number in range(1, 11))
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    BEFORE: "--before",
    AFTER: "--after",
    BYTES: "--int8-weight",
    WORK: "--float32",
    FP8: "--float8",
    FP16: "--float16-weight",
    BF16: "--bfloat16-weight",
}
SHADES = {"parameters": AFTER, "bytes": BYTES, "multiply-adds": WORK}
NAMES = {"parameters": "parameters", "bytes": "size", "multiply-adds": "multiply-adds"}
"""The labels of a model's sizes on a plot."""
ARITHMETICS = {
    "int8": ("INT8", AFTER),
    "float8": ("FP8", FP8),
    "float16": ("FP16", FP16),
    "bfloat16": ("BF16", BF16),
    "float32": ("FP32", WORK),
}
"""The name and the colour of each arithmetic, the narrowest first."""

SETTINGS: "dict[RcKeyType, Any]" = {
    "svg.fonttype": "none",
    "svg.hashsalt": "laconic",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}
SIZE = (4.6, 2.9)
"""Inches at 72 points: the plot scales with the page, and its text stays readable at the width of a phone."""


@matplotlib.rc_context(SETTINGS)
def plot_latency(timings: Sequence[Timing]) -> str:
    """Plot milliseconds per run by batch size, both axes logarithmic, with the quartiles as a band."""
    figure, axes = make_batch_axes(timings)
    for name, line in group_by_engine(timings).items():
        batches, colour = [time.batch for time in line], choose_colour(name)
        axes.plot(batches, [1e3 * time.seconds for time in line], "o-", color=colour)
        low, high = ([1e3 * time.quartiles[end] for time in line] for end in (0, 1))
        axes.fill_between(batches, low, high, color=colour, alpha=0.15, lw=0)
        label_line(axes, name, batches[-1], 1e3 * line[-1].seconds)
    axes.set_yscale("log")
    shown = [1e3 * time.seconds for time in timings]
    near = max(shown) < 30 * min(shown)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if near else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(format_tick))
    axes.yaxis.set_minor_locator(NullLocator())
    return render_svg(figure, "latency")


@matplotlib.rc_context(SETTINGS)
def plot_throughput(timings: Sequence[Timing], knee: int) -> str:
    """Plot rows per second by batch size, from zero, with the knee marked."""
    figure, axes = make_batch_axes(timings)
    for name, line in group_by_engine(timings).items():
        rates = [time.rows_per_second for time in line]
        axes.plot([time.batch for time in line], rates, "o-", color=choose_colour(name))
        label_line(axes, name, line[-1].batch, rates[-1])
    top = 1.15 * max(time.rows_per_second for time in timings)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(FuncFormatter(format_tick))
    axes.axvline(knee, color=MUTED, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    axes.annotate("knee", (knee, top), (3, -8), textcoords="offset points", color=MUTED, fontsize=8)
    return render_svg(figure, "throughput")


@matplotlib.rc_context(SETTINGS)
def plot_arithmetic(bars: Mapping[str, Mapping[str, float]]) -> str:
    """Plot the share of the multiply-adds in each arithmetic, 0 to 1, as a stacked bar per engine, with its name and
    its figures above."""
    figure = Figure(figsize=(2 * SIZE[0], 0.12 + 0.42 * len(bars)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(bars) - 0.1, -0.15)
    for row, (name, shares) in enumerate(bars.items()):
        left = 0.0
        ordered = {each: shares[each] for each in ARITHMETICS if each in shares}
        for each, share in (ordered | dict(shares)).items():
            axes.barh(row + 0.65, share, 0.34, left, color=ARITHMETICS.get(each, ("", MUTED))[1])
            left += share
        axes.text(0, row + 0.3, name, color=INK, va="center")
        axes.text(1, row + 0.3, format_arithmetic(ordered | dict(shares)), color=MUTED, va="center", ha="right")
    return render_svg(figure, "arithmetic")


def format_arithmetic(shares: Mapping[str, float]) -> str:
    """Format shares by arithmetic: `INT8 62.1 %, FP32 37.9 %`."""
    return ", ".join(f"{ARITHMETICS.get(each, (each,))[0]} {100 * share:.1f} %" for each, share in shares.items())


@matplotlib.rc_context(SETTINGS)
def plot_sizes(entries: Sequence[StageEntry]) -> str:
    """Plot each size after each stage, in percent of the source's."""
    figure, axes = make_stage_axes(entries)
    shown = {
        name: [(x, 100 * entry.left[name]) for x, entry in enumerate(entries) if name in entry.left] for name in SIZES
    }
    ends = []
    for name, points in shown.items():
        if len(points) > 1:
            axes.plot(*zip(*points, strict=True), "o-", color=SHADES[name])
            ends.append((points[-1][1], name))
    axes.set_ylim(0, 1.06 * max(value for points in shown.values() for _, value in points))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    for y, (_, name) in zip(space_apart([end[0] for end in sorted(ends)], 9.0), sorted(ends), strict=True):
        axes.text(1.04 * len(entries) - 1, y, NAMES[name], va="center", color=SHADES[name])
    return render_svg(figure, "sizes")


@matplotlib.rc_context(SETTINGS)
def plot_fidelity(entries: Sequence[StageEntry]) -> str:
    """Plot the fidelity after each stage: mean solid, worst sample dotted."""
    figure, axes = make_stage_axes(entries)
    for name, key, style in (("mean", "fidelity", "o-"), ("worst", "fidelity worst", "o:")):
        points = [(0, 1.0)] + [(x, entry.figures[key]) for x, entry in enumerate(entries) if key in entry.figures]
        colour = AFTER if name == "mean" else BEFORE
        axes.plot(*zip(*points, strict=True), style, color=colour)
        axes.annotate(name, points[-1], (8, 0), textcoords="offset points", va="center", color=colour)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    return render_svg(figure, "fidelity")


@matplotlib.rc_context(SETTINGS)
def plot_pareto_front(trials: Sequence[TrialRecord], *, drops: bool) -> str:
    """Plot quality loss over speed-up, with the Pareto front joined. drops: the loss is the drop of the metric, in
    points; else 1 - fidelity."""
    figure = Figure(figsize=(2 * SIZE[0], 1.3 * SIZE[1]))
    axes = figure.add_axes((0.09, 0.13, 0.88, 0.83))
    largest = max(trial.size for trial in trials)
    points = [(trial, loss) for trial in trials if (loss := quality_loss(trial, drops)) is not None]
    best = sorted((trial.speedup, loss) for trial, loss in points if trial.front)
    if best:
        axes.plot(*zip(*best, strict=True), "-", color=AFTER, zorder=1)
    for trial, loss in points:
        edge = AFTER if trial.front else BEFORE
        face = edge if trial.measured else "none"
        area = 20 + 140 * trial.size / largest
        alpha = 0.85 if trial.front else 0.5
        axes.scatter(trial.speedup, loss, area, facecolors=face, edgecolors=edge, alpha=alpha)
        if trial.reason.startswith("chosen"):
            axes.annotate("chosen", (trial.speedup, loss), (9, -3), textcoords="offset points", color=INK)
    axes.set_xlabel("speed-up over the original")
    axes.set_ylabel("drop of the metric, points" if drops else "1 - fidelity")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    return render_svg(figure, "front")


def quality_loss(trial: TrialRecord, drops: bool) -> float | None:
    """Compute the quality that a trial lost; None if it was not measured."""
    if drops:
        return None if trial.drop is None else 100 * trial.drop
    return None if trial.fidelity is None else 1 - trial.fidelity


def make_stage_axes(entries: Sequence[StageEntry]) -> tuple[Figure, Axes]:
    """Make axes over the stages, with space on the right for the labels of the lines."""
    figure = Figure(figsize=SIZE)
    axes = figure.add_axes((0.13, 0.3, 0.64, 0.67))
    names = [entry.stage.rpartition(":")[2] for entry in entries]
    axes.set_xticks(range(len(entries)), names, fontsize=8, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.02 * len(entries), 1.02 * len(entries) - 1)
    return figure, axes


def space_apart(values: Sequence[float], least: float) -> list[float]:
    """Move ascending values up until each is at least `least` above the one before."""
    spaced: list[float] = []
    for value in values:
        spaced.append(max(value, spaced[-1] + least) if spaced else value)
    return spaced


def make_batch_axes(timings: Sequence[Timing]) -> tuple[Figure, Axes]:
    """Make axes over batch sizes, with space on the right for the labels of the lines."""
    figure = Figure(figsize=SIZE)
    axes = figure.add_axes((0.1, 0.15, 0.72, 0.81))
    batches = sorted({time.batch for time in timings})
    axes.set_xscale("log", base=2)
    axes.set_xlim(batches[0] / 1.2, batches[-1] * 1.2)
    axes.xaxis.set_major_locator(FixedLocator(batches))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("batch size, rows")
    return figure, axes


def group_by_engine(timings: Sequence[Timing]) -> dict[str, list[Timing]]:
    """Group the timings by engine, the original first, each sorted by batch size."""
    names = sorted({time.engine for time in timings}, key=lambda name: (name != ORIGINAL, name))
    return {name: sorted((x for x in timings if x.engine == name), key=lambda x: x.batch) for name in names}


def choose_colour(engine: str) -> str:
    """Choose the colour of an engine's line."""
    return BEFORE if engine == ORIGINAL else AFTER


def label_line(axes: Axes, engine: str, x: float, y: float) -> None:
    """Write the label of a line at its end."""
    text = ORIGINAL if engine == ORIGINAL else "artifact"
    axes.annotate(text, (x, y), (8, 0), textcoords="offset points", va="center", color=choose_colour(engine))


def format_tick(value: float, _: int | None = None) -> str:
    """Format a number for an axis: 0.5, 100, 25k."""
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def render_svg(figure: Figure, salt: str) -> str:
    """Render a figure as an SVG element for HTML. salt: makes its ids differ from those of other figures on the
    page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"laconic {salt}"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r'\1 aria-hidden="true"', text)
    text = re.sub(r" font-family: [^;]*;", "", text)
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, f"var({variable})")
    return text
