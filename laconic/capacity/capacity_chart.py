"""The load on one replica against the 99th percentile, with the spread of the measurements, as SVG or PNG."""

import math
from pathlib import Path

from matplotlib.figure import Figure

from laconic.capacity.sizing import Sizing


def draw_capacity(sizing: Sizing, title: str, path: Path) -> None:
    """Draw the curve, the limit, and the load of the sizing. The suffix of the path says which format."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    rates = [point.rate for point in sizing.curve]

    def scale(seconds: float | None) -> float:
        return math.nan if seconds is None else 1e3 * seconds

    axes.plot(rates, [scale(point.p99) for point in sizing.curve], "o-", color="#0a7c78", label="p99")
    low, high = ([scale(point.p99_range[side]) for point in sizing.curve] for side in (0, 1))
    axes.fill_between(rates, low, high, color="#0a7c78", alpha=0.2, label="spread of the measurements")
    axes.axhline(1e3 * sizing.p99, color="#b3541e", linestyle="--", label="limit")
    if sizing.replicas:
        axes.axvline(sizing.forecast.rate, color="#555555", linestyle=":", label=f"with {sizing.replicas} replicas")
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="requests per second and replica", ylabel="p99, ms", yscale="log", xlim=(0, None))
    axes.legend()
    figure.savefig(path)
