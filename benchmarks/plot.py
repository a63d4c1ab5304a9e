"""Draw the table of README.md that compares MiniLM beside other tools: speed against fidelity.

    python benchmarks/plot.py [README.md] [-o docs/images/front.svg]

The figures are those of the table, which `run.py` measured; nothing is entered by hand. The same table gives the same
bytes.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
FIRST = "torch eager, FP32"
"""The row that speed-ups refer to, which has no point."""
OURS = "`compress"
LOWER = ("NNCF, INT8 (OpenVINO, float32)", "ONNX Runtime, dynamic")
"""Rows whose names stand below their points, where others are near."""
LEAST = 5e-5
"""What 1 - cosine is drawn as at the least: half of the last digit of the table."""
TICKS = (0.9999, 0.999, 0.99)


@dataclass(frozen=True)
class Point:
    """A row of the table. speed: times as fast as the original. similarity: mean cosine to the original's answers."""

    name: str
    speed: float
    similarity: float

    @property
    def is_ours(self) -> bool:
        """Whether Laconic made the model."""
        return self.name.startswith(OURS)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, nargs="?", default=ROOT / "README.md")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "images" / "front.svg")
    arguments = parser.parse_args()
    draw(read_points(arguments.page), arguments.output)


def read_points(page: Path) -> list[Point]:
    """Read the rows of the page's table whose third cell is a speed-up."""
    points = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        speed = re.match(r"([\d.]+) x \(", cells[2]) if len(cells) > 3 else None
        if speed is not None and re.fullmatch(r"[\d.]+", cells[3]):
            points.append(Point(cells[0], float(speed[1]), float(cells[3])))
    return points


def set_style() -> None:
    """Set the fonts of plots; the same figures then give the same bytes."""
    mpl.rcParams |= {"svg.hashsalt": "laconic", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}


def draw(points: list[Point], path: Path) -> None:
    """Draw points as an SVG whose words are text."""
    set_style()
    figure = Figure(figsize=(8.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for point in points:
        add_point(axes, point)
    axes.set_yscale("log")
    axes.set_ylim(0.013, LEAST / 2)
    axes.set_xlim(0, max(point.speed for point in points) + 2.5)
    axes.set_yticks([1 - tick for tick in TICKS], [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel(f"times as fast as {FIRST}")
    axes.set_ylabel("cosine similarity to the original's answers")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")


def add_point(axes: Axes, point: Point) -> None:
    """Draw a point with its name: Laconic's filled and others' hollow."""
    color = "#b5321c" if point.is_ours else "#44546a"
    place = point.speed, max(1 - point.similarity, LEAST)
    axes.plot(*place, "o", color=color, markerfacecolor=color if point.is_ours else "white", markersize=7)
    name = point.name.replace("`", "")
    is_right = point.is_ours or point.speed < 2.3  # else the name would leave the figure
    is_lower = point.name.startswith(LOWER)
    axes.annotate(
        name,
        place,
        xytext=(8 if is_right else -8, -8 if is_lower else 5),
        textcoords="offset points",
        horizontalalignment="left" if is_right else "right",
        verticalalignment="center",
        color=color,
        fontsize=8,
    )


if __name__ == "__main__":
    main()
