"""The saturation curve as SVG: latency over goodput, a point per load."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from laconic.loadtest.traffic import LoadPoint

SERIES = {"p50": "#0a7c78", "p99": "#b3541e"}
"""The percentiles that are drawn, with their colours."""


def draw_saturation(points: Sequence[LoadPoint], title: str, path: Path) -> None:
    """Draw the curve. Points without an answer are left out; latency is on a logarithmic scale."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    drawn = [point for point in points if point.latencies]
    for name, colour in SERIES.items():
        latencies = [point.latencies[name] for point in drawn]
        axes.plot([point.goodput for point in drawn], latencies, "o-", color=colour, label=name)
    for point in drawn:
        axes.annotate(f"{point.value:g} {point.load}", (point.goodput, point.latencies["p50"]), fontsize="small")
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="answers with status 200 per second", ylabel="latency, ms", yscale="log", xlim=(0, None))
    axes.legend()
    figure.savefig(path, format="svg")
