"""Calibration methods: from the histogram of a tensor to its range in 8 bits. One function per method.

Ranges that quantization-aware training learned are read from a checkpoint's history.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from compress.quantize.tensor_statistics import Histogram
from laconic.arrays import Array
from laconic.artifacts.record import Record
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Range
from laconic.quantization.qparams import fake_quantize_activation

LEVELS = 256
SHRINK_FACTORS = np.linspace(1.0, 0.3, 71)
"""Shares of the full range that are tried by the methods that search."""

HEADROOM = 1.1
"""The factor by which a range exceeds the observed one, as unseen samples do. It took the worst of 60 texts of one or
two words from 0.946 to 0.954, and the mean of MiniLM's texts from 0.9976 to 0.9975."""

RANGES = "ranges"
"""The key in a record's structure: [low, high] of each layer's input, by the layer's path."""


def minmax(histogram: Histogram) -> Range:
    """Return the observed range with some headroom."""
    return Range(histogram.low * HEADROOM, histogram.high * HEADROOM)


def percentile(histogram: Histogram, *, tail: float = 1e-5) -> Range:
    """Return all but `tail` of the values at either end."""
    return Range(histogram.quantile(tail), histogram.quantile(1 - tail))


def mse(histogram: Histogram) -> Range:
    """Return the range with the least squared quantization error, clipping included; the ends are searched one by
    one."""

    def error(values: Array, counts: Array, low: float, high: float) -> float:
        return float((counts * (values - fake_quantize_activation(values, Range(low, high))) ** 2).sum())

    return search_range(histogram, error)


def entropy(histogram: Histogram) -> Range:
    """Return the range with the least KL divergence between the 8-bit histogram and the full one.

    Migacz, 8-bit Inference with TensorRT (2017), for ranges that need not be symmetric.
    """

    def divergence(values: Array, counts: Array, low: float, high: float) -> float:
        p = counts / counts.sum()
        level = np.rint((np.clip(values, low, high) - low) * ((LEVELS - 1) / max(high - low, 1e-30))).astype(np.int64)
        inside = (values >= low) & (values <= high)
        if not inside.any():
            return np.inf
        kept = np.bincount(level[inside], weights=p[inside], minlength=LEVELS)
        bins = np.bincount(level[inside], minlength=LEVELS)
        # Clipped values are counted in the outermost bins of P, as in the quantized tensor.
        clipped = np.where(inside, p, 0.0)
        ends = np.flatnonzero(inside)[[0, -1]]
        clipped[ends[0]] += p[values < low].sum()
        clipped[ends[1]] += p[values > high].sum()
        q = np.where(inside, (kept / np.maximum(bins, 1))[level], 0.0)
        q = np.maximum(q / q.sum(), 1e-12)
        used = clipped > 0
        return float((clipped[used] * np.log(clipped[used] / q[used])).sum())

    return search_range(histogram, divergence)


def search_range(histogram: Histogram, loss: Callable[[Array, Array, float, float], float]) -> Range:
    """Return the range with the least loss; the end farther from zero is searched first, then the other."""
    used = histogram.counts > 0
    values, counts = histogram.centres[used], histogram.counts[used]
    low, high = histogram.low, histogram.high
    if high <= low or len(values) < 2:
        return Range(low, high)

    def lows() -> Iterator[tuple[float, float]]:
        return ((float(low * share), high) for share in SHRINK_FACTORS)

    def highs() -> Iterator[tuple[float, float]]:
        return ((low, float(high * share)) for share in SHRINK_FACTORS)

    for candidates in (highs, lows) if high > -low else (lows, highs):
        fitting = [(a, b) for a, b in candidates() if a < b and ((values >= a) & (values <= b)).sum() > 1]
        low, high = min(fitting or [(low, high)], key=lambda ends: loss(values, counts, *ends))
    return Range(low, high)


RANGE_METHODS: dict[str, Callable[[Histogram], Range]] = {
    "minmax": minmax,
    "percentile": percentile,
    "entropy": entropy,
    "mse": mse,
}


def read_learned_ranges(history: Sequence[Record], layers: Sequence[Layer]) -> dict[str, Range]:
    """Return the learned ranges of the layers' inputs, by tensor, from the last training in the history.

    Where several layers read a tensor, the union of their ranges.
    """
    records = [record.structure[RANGES] for record in history if RANGES in record.structure]
    learned: dict[str, tuple[float, float]] = records[-1] if records else {}
    ranges: dict[str, Range] = {}
    for layer in layers:
        if layer.module in learned:
            low, high = learned[layer.module]
            other = ranges.get(layer.input, Range(low, high))
            ranges[layer.input] = Range(min(low, other.low), max(high, other.high))
    return ranges
