"""The look of the plots of plans, and how they are written."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from laconic.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

GIB = 2**30
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


def check_path(path: Path) -> None:
    """Raise UsageError where no figure can be written: checked before the plan is made."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"a plan is drawn as .svg or .png, not as {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to draw {path.name!r} into")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure without date and version, which would differ from run to run."""
    none: dict[str, Any] = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
    figure.savefig(path, dpi=160, metadata=none)
