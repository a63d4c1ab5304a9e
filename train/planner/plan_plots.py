"""Plots of a memory plan: the peak memory of each combination by category, and the timeline of the chosen one."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from laconic.errors import UsageError
from laconic.units import format_binary_bytes
from train.offload.memory_accounting import CATEGORIES
from train.planner.memory_plan import MemoryPlan
from train.planner.plan_summary import select_rows
from train.planner.timeline_plot import COLOURS, LINE, MUTED, OVER, SETTINGS, find_phases, plot_timeline

GIB = 2**30

ROW, WIDTH, LABELS = 0.42, 10.5, 0.42
"""Height of a bar and width of the figure in inches, and the share of its width that the names take."""


def check_path(path: Path) -> None:
    """Raise UsageError where no figure can be written: checked before the plan is made."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"a plan is drawn as .svg or .png, not as {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to draw {path.name!r} into")


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
        none: dict[str, Any] = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
        figure.savefig(path, dpi=160, metadata=none)


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
    names = [timeline.positions[place][0] for place in timeline.places]
    events = np.arange(timeline.device.size)
    series = {str(name): values for name, values in timeline.series("device").items()}
    host = {str(name): values for name, values in timeline.series("host").items()}
    plot_timeline(events, series, find_phases(names), plan.memory, path, host=host)
