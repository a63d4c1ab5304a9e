"""The saturation curve as SVG: latency over goodput, a point per load."""

import math
from collections.abc import Callable, Sequence
from html import escape

from laconic.loadtest.traffic import LoadPoint

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 720, 420, 70, 60, 20
SERIES = {"p50": "#0a7c78", "p99": "#b3541e"}
"""The percentiles that are drawn, with their colours."""
GRID = (1, 2, 5)


def draw_saturation(points: Sequence[LoadPoint], title: str) -> str:
    """Draw the curve. Points without an answer are left out; latency is on a logarithmic scale."""
    drawn = [point for point in points if point.latencies]
    most = max((point.goodput for point in drawn), default=1.0) * 1.08
    times = [point.latencies[name] for point in drawn for name in SERIES] or [1.0]
    low, high = math.log10(min(times)) - 0.1, math.log10(max(times)) + 0.1

    def x(goodput: float) -> float:
        return LEFT + (WIDTH - LEFT - MARGIN) * goodput / most

    def y(milliseconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 2 * MARGIN) * (math.log10(milliseconds) - low) / (high - low)

    parts = [draw_grid(most, low, high, x, y)]
    for number, (name, colour) in enumerate(SERIES.items()):
        places = [(x(point.goodput), y(point.latencies[name])) for point in drawn]
        line = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point, (left, top) in zip(drawn, places, strict=True):
            caption = (
                f"{point.value:g} {point.load}: {point.goodput:.0f} requests/s, {name} {point.latencies[name]:.1f} ms"
            )
            parts.append(
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="{colour}"><title>{caption}</title></circle>'
            )
        parts.append(f'<text x="{LEFT + 10 + 60 * number}" y="{2 * MARGIN}" fill="{colour}">{name}</text>')
    parts += [
        f'<text x="{WIDTH / 2}" y="{MARGIN}" text-anchor="middle">{escape(title)}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 15}" text-anchor="middle">answers with status 200 per second</text>',
        f'<text transform="translate(18 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">latency, ms</text>',
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13">\n<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def draw_grid(most: float, low: float, high: float, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Draw the lines of the grid with their numbers."""
    parts = []
    step = next(factor * 10**power for power in range(-3, 9) for factor in GRID if most / (factor * 10**power) <= 8)
    for number in range(int(most / step) + 1):
        left = x(number * step)
        parts.append(f'<path d="M{left:.1f} {2 * MARGIN}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number * step:g}</text>')
    for power in range(math.floor(low), math.ceil(high)):
        for factor in GRID:
            value = factor * 10.0**power
            if low <= math.log10(value) <= high:
                top = y(value)
                parts.append(f'<path d="M{LEFT} {top:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
                parts.append(f'<text x="{LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{value:g}</text>')
    return "\n".join(parts)
