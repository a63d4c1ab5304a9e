"""Plot of memory in use over time: stacked areas by category, the phases of the step, and the breakdown of the peak.

The same values give the same bytes: ids are hashed with a fixed salt, and no date is written.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from laconic.errors import UsageError
from laconic.units import choose_unit

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

Bytes = NDArray[np.integer[Any]]
Phase = tuple[str, float, float]

COLOURS = {
    "parameters": "#2f5d8a",
    "gradients": "#7aa6c2",
    "optimizer": "#e0a458",
    "activations": "#c8553d",
    "temporaries": "#a9a29c",
}
"""By category, from long-lived to temporary; distinguishable in grey and by colour-blind readers."""
SPARE = ("#6a4c93", "#4f9d69", "#b5838d")
INK, MUTED, LINE, SHADE, OVER = "#1f2328", "#656d76", "#d8dee4", "#f4f5f7", "#b3261e"
SETTINGS: "dict[RcKeyType, Any]" = {
    "svg.fonttype": "none",
    "svg.hashsalt": "laconic timeline",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
SIZE = (9.6, 4.8)
HOST_HEIGHT = 1.5
"""Height of the host's panel, in inches."""
LEFT, RIGHT, TOP, BOTTOM, GAP = 0.75, 2.35, 0.75, 0.55, 0.3
"""Margins, and the space between panels, in inches; the breakdown of the peak is on the right."""
COLUMNS = 450
"""Columns that the time axis is reduced to, each with its highest and its lowest value."""


def plot_timeline(
    at: NDArray[Any],
    series: Mapping[str, Bytes],
    phases: Sequence[Phase],
    limit: int | None,
    path: Path,
    *,
    host: Mapping[str, Bytes] | None = None,
    title: str = "Device memory",
) -> None:
    """Plot memory in use as areas stacked by category, with the phases, the peak and the limit.

    at: [n], increasing: seconds where floating, the index of the event where integer. series: [n] bytes in use from
    that instant on, by category, stacked from the bottom up. phases: (name, start, end) on the axis of `at`. limit:
    memory of the device, in bytes. host: as `series`, of the host, in a panel of their own where any is used.
    path: .svg or .png. Raises UsageError for another suffix, or for series of another length.
    """
    check_values(at, {**series, **{f"host {name}": values for name, values in (host or {}).items()}}, path)
    panels = [(title, drop_empty(series) or series, limit), ("Host memory", drop_empty(host or {}), None)]
    panels = [each for each in panels if each[1]]
    height = SIZE[1] + (HOST_HEIGHT + GAP) * (len(panels) - 1)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(SIZE[0], height))
        tall = height - TOP - BOTTOM - (HOST_HEIGHT + GAP) * (len(panels) - 1)
        bottom = height - TOP
        for number, (name, bytes_by, most) in enumerate(panels):
            inches = HOST_HEIGHT if number else tall
            bottom -= inches + (GAP if number else 0)
            box = (LEFT / SIZE[0], bottom / height, 1 - (LEFT + RIGHT) / SIZE[0], inches / height)
            axes = figure.add_axes(box)
            plot_panel(axes, at, bytes_by, phases, name, most, named=not number)
            if number < len(panels) - 1:
                axes.tick_params(labelbottom=False)
        axes.set_xlabel("seconds" if np.issubdtype(at.dtype, np.floating) else "events: allocations and releases")
        none: dict[str, Any] = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
        figure.savefig(path, dpi=160, metadata=none)


def find_phases(names: Sequence[str]) -> list[Phase]:
    """Find the runs of equal names, given the name of the phase of each event."""
    edges = [number for number, name in enumerate(names) if not number or name != names[number - 1]]
    return [(names[start], start, end) for start, end in pairwise([*edges, len(names) - 1])] if edges else []


def drop_empty(series: Mapping[str, Bytes]) -> dict[str, Bytes]:
    """Drop the categories that are zero throughout."""
    return {name: values for name, values in series.items() if values.any()}


def check_values(at: NDArray[Any], series: Mapping[str, Bytes], path: Path) -> None:
    """Raise UsageError for a suffix other than .svg and .png, and for values of the wrong shape."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"a time-line is drawn as .svg or .png, not as {path.name!r}")
    if at.ndim != 1 or not at.size or not series:
        raise UsageError(f"a time-line needs instants and categories, got {at.shape} and {len(series)}")
    for name, values in series.items():
        if values.shape != at.shape:
            raise UsageError(f"{name} has {values.shape} figures for {at.shape} instants; expected as many")


def plot_panel(
    axes: Axes,
    at: NDArray[Any],
    series: Mapping[str, Bytes],
    phases: Sequence[Phase],
    title: str,
    limit: int | None,
    *,
    named: bool,
) -> None:
    """Plot the memory of the device or of the host. named: whether the names of the phases stand above."""
    total = np.sum(list(series.values()), axis=0)
    peak = int(total.argmax())
    unit, scale = choose_unit(max(int(total[peak]), 1))
    kept = downsample(total)
    edges, heights = at[kept], np.zeros(kept.size)
    for name, values in series.items():
        base, heights = heights, heights + values[kept] / scale
        axes.fill_between(edges, base, heights, step="post", color=get_colour(name, series), lw=0)
    axes.set_xlim(at[0], at[-1] if at[-1] > at[0] else at[0] + 1)
    axes.set_ylim(0, find_axis_limit(total[peak] / scale, limit and limit / scale))
    axes.yaxis.set_major_locator(MaxNLocator(5 if named else 3, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=not np.issubdtype(at.dtype, np.floating)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}".replace(",", "\u2009")))
    axes.grid(axis="y")
    axes.set_ylabel(unit)
    shade_phases(axes, phases, named=named)
    mark_peak(axes, float(at[peak]), total[peak] / scale)
    if limit is not None:
        draw_limit(axes, limit / scale, unit, over=bool(total[peak] > limit))
    where = next((name for name, start, end in reversed(phases) if start <= at[peak] <= end), "")
    draw_breakdown(axes, series, peak, (title, where), unit, scale)


def downsample(total: Bytes) -> NDArray[np.intp]:
    """Choose the indices to plot: of the highest and the lowest value of each column, the first and the last."""
    if total.size <= 2 * COLUMNS:
        return np.arange(total.size)
    parts = np.array_split(np.arange(total.size), COLUMNS)
    ends = [part[[total[part].argmax(), total[part].argmin()]] for part in parts]
    return np.unique(np.concatenate([[0, total.argmax(), total.size - 1], *ends]))


def find_axis_limit(peak: float, limit: float | None) -> float:
    """Find the top of the memory axis: above the peak, and above the limit unless that would flatten the areas."""
    return 1.12 * max(peak, limit if limit and limit < 2.5 * peak else 0, 1e-9)


def get_colour(name: str, series: Mapping[str, Bytes]) -> str:
    """Return the colour of a category; an unknown one gets a spare colour."""
    others = [each for each in series if each not in COLOURS]
    return COLOURS[name] if name in COLOURS else SPARE[others.index(name) % len(SPARE)]


def shade_phases(axes: Axes, phases: Sequence[Phase], *, named: bool) -> None:
    """Shade every other phase, with the names above where they fit; phases of under 3 points are left out."""
    left, right = axes.get_xlim()
    assert isinstance(axes.figure, Figure)
    points = 72 * axes.get_position().width * axes.figure.get_figwidth() / (right - left)
    clipped = [(name, max(start, left), min(end, right)) for name, start, end in phases]
    wide = [(name, start, end) for name, start, end in clipped if points * (end - start) >= 3]
    for number, (name, start, end) in enumerate(wide):
        if number % 2 == 0:
            axes.axvspan(start, end, color=SHADE, lw=0, zorder=0)
        if number:
            axes.axvline(start, color=LINE, lw=0.6, zorder=0.5)
        room, needed = points * (end - start), 4.6 * len(name)
        if named and room >= 10:
            flat = room >= needed
            axes.annotate(
                name,
                ((start + end) / 2, 1),
                (0, 4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center" if flat else "left",
                va="bottom",
                rotation=0 if flat else 35,
                rotation_mode="anchor",
                color=MUTED,
                fontsize=8,
            )


def mark_peak(axes: Axes, x: float, y: float) -> None:
    """Mark the peak by a dot and a dashed line."""
    axes.plot([x, x], [0, y], color=INK, lw=0.8, ls=(0, (2, 2)), zorder=4)
    axes.plot([x], [y], "o", color=INK, ms=4.5, mec="white", mew=0.8, zorder=5, clip_on=False)


def draw_limit(axes: Axes, limit: float, unit: str, *, over: bool) -> None:
    """Draw the memory limit as a line, or as text where it is above the axis."""
    tint, text = (OVER if over else MUTED), f"limit {limit:.4g} {unit}"
    if limit <= axes.get_ylim()[1]:
        axes.axhline(limit, color="white", lw=2.4, zorder=3.9)
        axes.axhline(limit, color=tint, lw=1.2, ls=(0, (5, 3)), zorder=4)
        place = (0.006, limit)
        axes.annotate(
            text, place, (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points", color=tint, fontsize=8
        )
    else:
        axes.annotate(
            f"{text}, above this picture", (0.006, 0.985), xycoords="axes fraction", va="top", color=tint, fontsize=8
        )


def draw_breakdown(
    axes: Axes, series: Mapping[str, Bytes], peak: int, names: tuple[str, str], unit: str, scale: int
) -> None:
    """Write the categories of the peak to the right of the panel, topmost area first, with their colours."""
    assert isinstance(axes.figure, Figure)
    figure, box = axes.figure, axes.get_position()
    width, height = figure.get_size_inches()
    x, right = box.x1 + 0.25 / width, 1 - 0.15 / width
    y = box.y1 - 0.02 / height
    total = sum(int(values[peak]) for values in series.values())
    title, where = names
    figure.text(x, y, title, va="top", fontsize=9, color=MUTED)
    size = f"{total / scale:.2f} {unit}"
    figure.text(x, y - 0.2 / height, size, va="top", fontsize=14, fontweight="bold")
    figure.text(x, y - 0.47 / height, f"at the peak{', in ' + where if where else ''}", va="top", color=MUTED)
    for number, name in enumerate(reversed(list(series))):
        line = y - (0.82 + 0.215 * number) / height
        patch = Rectangle((x, line - 0.055 / height), 0.11 / width, 0.11 / height, lw=0, fc=get_colour(name, series))
        figure.add_artist(patch)
        part = int(series[name][peak])
        figure.text(x + 0.2 / width, line, name, va="center_baseline")
        figure.text(right - 0.48 / width, line, f"{part / scale:.2f}", va="center_baseline", ha="right")
        share = f"{100 * part / total:.0f} %" if total else ""
        figure.text(right, line, share, va="center_baseline", ha="right", color=MUTED)
