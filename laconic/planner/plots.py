"""A plan as pictures: what each combination holds at its peak, and the time-line of the one that was chosen."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from laconic.errors import UsageError
from laconic.offload.memory_accounting import CATEGORIES
from laconic.planner.memory_plan import Plan
from laconic.planner.plan_tables import GIB, shown
from laconic.planner.timeline_plot import COLOURS, LINE, MUTED, OVER, SETTINGS, bands, draw

ROW, WIDTH, LABELS = 0.42, 10.5, 0.42
"""Inches of a bar, inches of the picture, and the share of its width that the names take."""


def check(path: Path) -> None:
    """Raise UsageError where nothing can be drawn there: to be found before the plan is made."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"a plan is drawn as .svg or .png, not as {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to draw {path.name!r} into")


def bars(plan: Plan, path: Path) -> None:
    """A bar for each combination of the table, its categories side by side, and the memory that there is.

    path: .svg or .png. Raises UsageError for another suffix.
    """
    check(path)
    rows = shown(plan)
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
        plain = plan.plain.prediction
        for place, row, end in zip(places, rows, left, strict=True):
            times = row.prediction.seconds / plain.seconds
            axes.text(end, place, f"  {row.prediction.peak / GIB:.2f} GiB, {times:.2f}x time", va="center", color=MUTED)
        chosen = plan.chosen.candidate.name if plan.chosen else None
        names = [("▸ " if row.candidate.name == chosen else "") + wrapped(row.candidate.name) for row in rows]
        axes.set_yticks(places, names)
        axes.axvline(plan.memory / GIB, color=OVER, linewidth=1.2)
        axes.text(plan.memory / GIB, len(rows) - 0.4, f" {plan.memory / GIB:.1f} GiB", color=OVER, va="bottom")
        axes.set_xlim(0, 1.25 * max(float(left.max()), 1e-9))
        axes.set_ylim(-0.6, len(rows) - 0.1)
        axes.set_xlabel("GiB on the device, at the peak of a step")
        axes.grid(axis="x", color=LINE)
        axes.legend(loc="lower right", ncols=len(CATEGORIES), frameon=False, bbox_to_anchor=(1, 1.0), fontsize=8)
        title = f"{plan.subject.name}, batch {plan.plain.candidate.training.batch_size}, length {plan.length}"
        figure.text(0.01, 1 - 0.3 / height, title, fontsize=12, fontweight="bold")
        none: dict[str, Any] = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
        figure.savefig(path, dpi=160, metadata=none)


def wrapped(name: str, width: int = 58) -> str:
    """On two lines where it is long."""
    if len(name) <= width:
        return name
    cut = name.rfind(" + ", 0, width)
    return f"{name[:cut]}\n{name[cut + 1 :]}" if cut > 0 else name


def timeline(plan: Plan, path: Path) -> None:
    """The memory of two steps of the chosen combination, allocation by allocation."""
    if plan.chosen is None:
        raise UsageError("there is no time-line to draw, since nothing fits. Give more --memory")
    found = plan.whole(plan.chosen)
    course = found.course
    assert course is not None
    names = [course.positions[place][0] for place in course.places]
    at = np.arange(course.device.size)
    series = {str(name): values for name, values in course.series("device").items()}
    host = {str(name): values for name, values in course.series("host").items()}
    draw(at, series, bands(names), plan.memory, path, host=host)
