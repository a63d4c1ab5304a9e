"""Plots of a memory plan: the peak memory of each combination by category, and the timeline of the chosen one.

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
from matplotlib.patches import Patch
from numpy.typing import NDArray

from laconic.errors import UsageError
from laconic.units import choose_unit, format_binary_bytes
from train.offload.memory_accounting import CATEGORIES
from train.planner.memory_plan import MemoryPlan
from train.planner.plan_summary import select_rows
from train.planner.plot_style import GIB, INK, LINE, MUTED, OVER, SETTINGS, SHADE, check_path, save_figure

if TYPE_CHECKING:
    pass

Bytes = NDArray[np.integer[Any]]
Phase = tuple[str, int, int]
"""Its name, and the first and the last of its events."""

COLOURS = {
    "parameters": "#2f5d8a",
    "gradients": "#7aa6c2",
    "optimizer": "#e0a458",
    "activations": "#c8553d",
    "temporaries": "#a9a29c",
}
"""By category, from long-lived to temporary; distinguishable in grey and by colour-blind readers."""
ROW, WIDTH, LABELS = 0.42, 10.5, 0.42
"""Height of a bar and width of the figure in inches, and the share of its width that the names take."""
HEIGHTS = (3.5, 1.5)
"""Heights of the device's panel and of the host's, in inches."""
COLUMNS = 450
"""Columns that the events are reduced to, each with its highest and its lowest value."""


def plot_bars(plan: MemoryPlan, path: Path) -> None:
    """Plot the peak memory of each combination of the table as a bar stacked by category, and the available memory.

    path: .svg or .png. Raises UsageError for another suffix.
    """
    check_path(path)
    rows = select_rows(plan)
    with matplotlib.rc_context(SETTINGS):
        height = 1.5 + ROW * len(rows)
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((LABELS, 0.6 / height, 0.96 - LABELS, 1 - 1.3 / height))
        places = np.arange(len(rows))[::-1]
        left = np.zeros(len(rows))
        for category in CATEGORIES:
            sizes = np.array([row.prediction.at_peak[category] / GIB for row in rows])
            axes.barh(places, sizes, left=left, height=0.66, color=COLOURS[category], label=category)
            left += sizes
        plain, kind = plan.plain.prediction, "time" if plan.has_device_times else "CPU time"
        for place, row, end in zip(places, rows, left, strict=True):
            times = row.prediction.seconds / plain.seconds
            label = f"  {format_binary_bytes(row.prediction.peak)}, {times:.2f}x {kind}"
            axes.text(end, place, label, va="center", color=MUTED)
        chosen = plan.chosen.combination.name if plan.chosen else None
        names = [("▸ " if row.combination.name == chosen else "") + wrap(row.combination.name) for row in rows]
        axes.set_yticks(places, names)
        axes.axvline(plan.memory / GIB, color=OVER, linewidth=1.2)
        axes.text(plan.memory / GIB, len(rows) - 0.4, f" {format_binary_bytes(plan.memory)}", color=OVER, va="bottom")
        axes.set_xlim(0, 1.25 * max(float(left.max()), 1e-9))
        axes.set_ylim(-0.6, len(rows) - 0.1)
        axes.set_xlabel("GiB on the device, at the peak of a step")
        axes.grid(axis="x", color=LINE)
        axes.legend(loc="lower right", ncols=len(CATEGORIES), frameon=False, bbox_to_anchor=(1, 1.0), fontsize=8)
        title = f"{plan.model.name}, batch {plan.plain.combination.training.batch_size}, length {plan.length}"
        figure.text(0.01, 1 - 0.3 / height, title, fontsize=12, fontweight="bold")
        save_figure(figure, path)


def wrap(name: str, width: int = 58) -> str:
    """Break a long name into two lines."""
    if len(name) <= width:
        return name
    end = name.rfind(" + ", 0, width)
    return f"{name[:end]}\n{name[end + 1 :]}" if end > 0 else name


def plot_chosen(plan: MemoryPlan, path: Path) -> None:
    """Plot the memory of two steps of the chosen combination, by allocation. Raises UsageError where none fits."""
    timeline = plan.predict_whole(plan.chosen).timeline if plan.chosen else None
    if timeline is None:
        raise UsageError("there is no time-line to draw, since nothing fits. Give more --memory")
    phases = find_phases([timeline.positions[place][0] for place in timeline.places])
    plot_timeline(timeline.series("device"), timeline.series("host"), phases, plan.memory, path)


def plot_timeline(
    device: Mapping[Any, Bytes], host: Mapping[Any, Bytes], phases: Sequence[Phase], limit: int, path: Path
) -> None:
    """Plot the memory in use as areas stacked by category, with the phases, the peak and the limit.

    device, host: [events] bytes in use after each event, by category; the host's have a panel of their own where any
    are used. limit: memory of the device, in bytes. path: .svg or .png. Raises UsageError for another.
    """
    check_path(path)
    panels = [("Device memory", device, limit)]
    if any(values.any() for values in host.values()):
        panels.append(("Host memory", host, 0))
    heights = HEIGHTS[: len(panels)]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, sum(heights) + 1.3), layout="constrained")
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (title, series, most) in zip(grid[:, 0], panels, strict=True):
            plot_panel(axes, series, phases, title, most)
            shade_phases(axes, phases, are_named=axes is grid[0, 0])
        axes.set_xlabel("events: allocations and releases")
        save_figure(figure, path)


def find_phases(names: Sequence[str]) -> list[Phase]:
    """Find the runs of equal names, given the name of the phase of each event."""
    edges = [number for number, name in enumerate(names) if not number or name != names[number - 1]]
    return [(names[start], start, end) for start, end in pairwise([*edges, len(names) - 1])] if edges else []


def plot_panel(axes: Axes, series: Mapping[Any, Bytes], phases: Sequence[Phase], title: str, limit: int) -> None:
    """Plot the memory of the device, or of the host, whose limit is 0 for none. The legend breaks the peak down."""
    used = {name: values for name, values in series.items() if values.any()} or dict(series)
    total = np.sum(list(used.values()), axis=0)
    peak = int(total.argmax())
    unit, scale = choose_unit(max(int(total[peak]), 1))
    top, kept = total[peak] / scale, downsample(total)
    colours = [COLOURS[name] for name in used]
    axes.stackplot(kept, *(values[kept] / scale for values in used.values()), step="post", colors=colours, lw=0)
    axes.plot([peak, peak], [0, top], color=INK, lw=0.8, ls=(0, (2, 2)))
    axes.plot([peak], [top], "o", color=INK, ms=4.5, mec="white", mew=0.8, clip_on=False)
    # Above the peak, and above the limit unless that would flatten the areas.
    shown = 0 < limit < 2.5 * total[peak]
    axes.set_ylim(0, 1.12 * max(top, limit / scale if shown else 0, 1e-9))
    axes.set_xlim(0, max(total.size - 1, 1))
    if limit:
        tint = OVER if total[peak] > limit else MUTED
        label = f"limit {limit / scale:.4g} {unit}"
        if shown:
            axes.axhline(limit / scale, color=tint, lw=1.2, ls=(0, (5, 3)))
            axes.text(0.006, limit / scale, label, color=tint, va="bottom", transform=axes.get_yaxis_transform())
        else:
            axes.text(0.006, 0.985, f"{label}, above this picture", color=tint, va="top", transform=axes.transAxes)
    axes.grid(axis="y")
    axes.set_ylabel(unit)
    where = next((f", in {name}" for name, start, end in reversed(phases) if start <= peak <= end), "")
    parts = {name: int(values[peak]) for name, values in reversed(used.items())}
    labels = [f"{part / scale:.2f}  {name}, {part / max(int(total[peak]), 1):.0%}" for name, part in parts.items()]
    axes.legend(
        [Patch(color=COLOURS[name]) for name in parts],
        labels,
        loc="upper left",
        title=f"{title}\n{top:.2f} {unit} at the peak{where}",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        alignment="left",
    )


def downsample(total: Bytes) -> NDArray[np.intp]:
    """Choose the indices to plot: of the highest and the lowest value of each column, the first and the last."""
    if total.size <= 2 * COLUMNS:
        return np.arange(total.size)
    parts = np.array_split(np.arange(total.size), COLUMNS)
    ends = [part[[total[part].argmax(), total[part].argmin()]] for part in parts]
    return np.unique(np.concatenate([[0, total.argmax(), total.size - 1], *ends]))


def shade_phases(axes: Axes, phases: Sequence[Phase], *, are_named: bool) -> None:
    """Shade every other phase that is wide enough to be seen, with the names above where they fit."""
    length = axes.get_xlim()[1]
    wide = [phase for phase in phases if phase[2] - phase[1] >= 0.006 * length]
    for number, (name, start, end) in enumerate(wide):
        axes.axvspan(start, end, color=SHADE if number % 2 == 0 else "white", lw=0, zorder=0)
        share = (end - start) / length
        if are_named and share >= 0.02:
            flat = share >= 0.0095 * len(name)
            style = {"ha": "center"} if flat else {"ha": "left", "rotation": 35, "rotation_mode": "anchor"}
            place = axes.get_xaxis_transform()
            axes.text((start + end) / 2, 1.02, name, va="bottom", color=MUTED, fontsize=8, transform=place, **style)
