"""Pictures for the report: SVG that takes its colours and its type from the page around it.

The same figures give the same bytes: ids come from a fixed salt, and nothing says when it was drawn.
"""

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from laconic.measured import ORIGINAL, Timing

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

# Colours that stand for the page's own, which differ between light and dark.
INK, MUTED, LINE, BEFORE, AFTER = (f"#00000{number}" for number in range(1, 6))
VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", BEFORE: "--before", AFTER: "--after"}

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
"""Inches at 72 points: the picture scales with the page, and its type stays readable at a phone's width."""


def latency(timings: Sequence[Timing]) -> str:
    """Milliseconds per run by batch size, both axes logarithmic, the quartiles as a band."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = canvas(timings)
        for name, line in by_engine(timings).items():
            batches = [time.batch for time in line]
            axes.plot(batches, [1e3 * time.seconds for time in line], "o-", color=colour(name))
            low, high = zip(*(time.quartiles for time in line), strict=True)
            axes.fill_between(
                batches,
                [1e3 * each for each in low],
                [1e3 * each for each in high],
                color=colour(name),
                alpha=0.15,
                lw=0,
            )
            label(axes, name, batches[-1], 1e3 * line[-1].seconds)
        axes.set_yscale("log")
        shown = [1e3 * time.seconds for time in timings]
        near = max(shown) < 30 * min(shown)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if near else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.yaxis.set_minor_locator(NullLocator())
        return svg(figure, "latency")


def throughput(timings: Sequence[Timing], knee: int) -> str:
    """Rows per second by batch size, from zero; the knee marked."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = canvas(timings)
        for name, line in by_engine(timings).items():
            rates = [time.rows_per_second for time in line]
            axes.plot([time.batch for time in line], rates, "o-", color=colour(name))
            label(axes, name, line[-1].batch, rates[-1])
        top = 1.15 * max(time.rows_per_second for time in timings)
        axes.set_ylim(0, top)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.axvline(knee, color=MUTED, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
        axes.annotate("knee", (knee, top), (3, -8), textcoords="offset points", color=MUTED, fontsize=8)
        return svg(figure, "throughput")


def canvas(timings: Sequence[Timing]) -> tuple[Figure, Axes]:
    """Axes over batch sizes, with room on the right for the names of the lines."""
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


def by_engine(timings: Sequence[Timing]) -> dict[str, list[Timing]]:
    """The timings of each line, by batch size, the original first."""
    names = sorted({time.engine for time in timings}, key=lambda name: (name != ORIGINAL, name))
    return {name: sorted((x for x in timings if x.engine == name), key=lambda x: x.batch) for name in names}


def colour(engine: str) -> str:
    """Of an engine's line."""
    return BEFORE if engine == ORIGINAL else AFTER


def label(axes: Axes, engine: str, x: float, y: float) -> None:
    """The name of a line, at its end."""
    text = ORIGINAL if engine == ORIGINAL else "artifact"
    axes.annotate(text, (x, y), (8, 0), textcoords="offset points", va="center", color=colour(engine))


def short(value: float) -> str:
    """A number for an axis: 0.5, 100, 25k."""
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def svg(figure: Figure, salt: str) -> str:
    """The picture as an element for HTML. salt: tells the ids of one picture from those of another on the page."""
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
