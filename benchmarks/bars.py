"""Draw tables of the documentation as bars.

    python benchmarks/bars.py [-o docs/images]

The figures are those of the tables, which other benchmarks measured; nothing is entered by hand. The same tables give
the same bytes.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from plot import set_style

DOCS = Path(__file__).parents[1] / "docs"
OURS, OTHER, HOST = "#b5321c", "#8b97a5", "#e3c1b8"
"""Colours: of Laconic's bars, of others', and of memory on the host behind those of a device."""


@dataclass(frozen=True)
class Bar:
    """A row of a table. lengths: of the parts of the bar."""

    name: str
    lengths: tuple[float, ...]
    is_ours: bool


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=DOCS / "images")
    draw_all(parser.parse_args().output)


def draw_all(folder: Path) -> None:
    """Draw the plots of servers and of the memory of training into a folder."""
    share = "share of bare uvicorn's requests per second of processor time, 16 clients"
    draw(read_servers(), share, folder / "servers.svg")
    draw(read_memory(), "peak of a training step, GiB: on the device, and on the host (pale)", folder / "training.svg")


def read_servers() -> list[Bar]:
    """Read the share of bare uvicorn's requests, by server."""
    rows = read_table(DOCS / "performance-server.md", "server, wire format")
    return [Bar(row[0], (float(row[2].split()[0]),), "Laconic" in row[0]) for row in rows[1:]]


def read_memory() -> list[Bar]:
    """Read the memory of the rows of training that are on the page's first table."""
    rows = read_table(DOCS / "performance-training.md", "same losses")
    return [Bar(row[0], (float(row[1]), float(row[2])), "for comparison" not in row[0]) for row in rows]


def read_table(page: Path, head: str) -> list[list[str]]:
    """Read the cells of the first table of a page whose first head is this. Raises StopIteration without one."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def draw(bars: Sequence[Bar], label: str, path: Path) -> None:
    """Draw bars, the first on top, with their names and lengths, as an SVG whose words are text."""
    set_style()
    figure = Figure(figsize=(8.2, 0.6 + 0.34 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for place, bar in enumerate(bars):
        start = 0.0
        for length, colour in zip(bar.lengths, (OURS if bar.is_ours else OTHER, HOST), strict=False):
            axes.barh(place, length, left=start, height=0.62, color=colour)
            start += length
        axes.annotate(
            " + ".join(f"{length:g}" for length in bar.lengths if length),
            (start, place),
            xytext=(4, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(bars)), [re.sub(r"[`*]", "", bar.name) for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")


if __name__ == "__main__":
    main()
