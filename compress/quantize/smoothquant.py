"""Make activations easier to quantize: move the spread of their channels into the weights.

Xiao et al., SmoothQuant (2023): x W = (x / s) (s W), where s = max|x|^alpha / max|w|^(1 - alpha) by channel. The paper
takes one alpha for the model; here each tensor takes the one with the least error of the layers that read it, or none.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from compress.quantize.channel_statistics import Channels
from compress.quantize.ranges import HEADROOM
from laconic.quantization.plan import Range, Smoothing
from laconic.quantization.qparams import rounded_activation, rounded_weight
from laconic.tensor import Array

ALPHAS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
GAIN = 0.9
"""The share of the error that must be left at most, for the extra work to be worth while."""


def smoothed(channels: Channels, weights: Sequence[Array]) -> Smoothing | None:
    """The best factors for a tensor and the weights [in, out] that it is multiplied with; None where none pays."""
    candidates = [smoothing(channels, weights, alpha) for alpha in ALPHAS]
    best = min(candidates, key=lambda each: error(channels.rows, weights, each))
    plain = Smoothing(np.ones(channels.rows.shape[-1], np.float32), limits(channels, None))
    return best if error(channels.rows, weights, best) < GAIN * error(channels.rows, weights, plain) else None


def smoothing(channels: Channels, weights: Sequence[Array], alpha: float) -> Smoothing:
    """The factors for one alpha, their geometric mean 1, and the range of what they leave."""
    largest = np.maximum(channels.largest, 1e-5)
    weight = np.maximum(np.max([np.abs(each).max(axis=1) for each in weights], axis=0), 1e-5)
    factors = largest**alpha / weight ** (1 - alpha)
    factors = (factors / np.exp(np.log(factors).mean())).astype(np.float32)
    return Smoothing(factors, limits(channels, factors))


def limits(channels: Channels, factors: Array | None) -> Range:
    """Everything that was seen, after division by the factors, and some headroom."""
    assert channels.low is not None
    assert channels.high is not None
    divisor = 1.0 if factors is None else factors
    low, high = float((channels.low / divisor).min()), float((channels.high / divisor).max())
    return Range(low * HEADROOM, high * HEADROOM)


def error(rows: Array, weights: Sequence[Array], each: Smoothing) -> float:
    """The squared error of the products, relative to their size, with both sides on their grids."""
    activations = rounded_activation(rows / each.factors, each.limits)
    total = 0.0
    for weight in weights:
        exact = rows @ weight
        found = activations @ rounded_weight(weight * each.factors[:, None], 1)
        total += float(((found - exact) ** 2).sum() / max(float((exact**2).sum()), 1e-30))
    return total


def smooth_all(channels: Mapping[str, Channels], readers: Mapping[str, Sequence[Array]]) -> dict[str, Smoothing]:
    """The smoothing of each tensor for which it pays. readers: the weights that a tensor is multiplied with."""
    found = {name: smoothed(channels[name], readers[name]) for name in readers}
    return {name: each for name, each in found.items() if each is not None}
