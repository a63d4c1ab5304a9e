"""SmoothQuant: make activations easier to quantize by scaling their channels, and the weights inversely.

Xiao et al., SmoothQuant (2023): x W = (x / s) (s W), where s = max|x|^alpha / max|w|^(1 - alpha) by channel. The paper
uses one alpha for the model; here each tensor has the one with the least error in the layers that read it, or none.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from compress.quantize.ranges import HEADROOM
from compress.quantize.tensor_statistics import ChannelStatistics
from laconic.arrays import Array
from laconic.quantization.plan import Range, Smoothing
from laconic.quantization.qparams import fake_quantize_activation, fake_quantize_weight

ALPHAS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
MAX_ERROR_SHARE = 0.9
"""The share of the error that may remain for smoothing to be worth the extra work."""


def find_smoothing(channels: ChannelStatistics, weights: Sequence[Array]) -> Smoothing | None:
    """Return the best smoothing for a tensor and the weights [in, out] that it is multiplied with; None where none
    pays."""
    candidates = [make_smoothing(channels, weights, alpha) for alpha in ALPHAS]
    best = min(candidates, key=lambda candidate: quantization_error(channels.rows, weights, candidate))
    plain = Smoothing(np.ones(channels.rows.shape[-1], np.float32), smoothed_range(channels, None))
    unsmoothed_error = quantization_error(channels.rows, weights, plain)
    return best if quantization_error(channels.rows, weights, best) < MAX_ERROR_SHARE * unsmoothed_error else None


def make_smoothing(channels: ChannelStatistics, weights: Sequence[Array], alpha: float) -> Smoothing:
    """Return the smoothing for one alpha: factors with a geometric mean of 1, and the range of the smoothed tensor."""
    largest = np.maximum(channels.absolute_max, 1e-5)
    weight = np.maximum(np.max([np.abs(matrix).max(axis=1) for matrix in weights], axis=0), 1e-5)
    factors = largest**alpha / weight ** (1 - alpha)
    factors = (factors / np.exp(np.log(factors).mean())).astype(np.float32)
    return Smoothing(factors, smoothed_range(channels, factors))


def smoothed_range(channels: ChannelStatistics, factors: Array | None) -> Range:
    """Return the observed range after division by the factors (None: 1), with some headroom."""
    divisor = 1.0 if factors is None else factors
    low, high = float((channels.low / divisor).min()), float((channels.high / divisor).max())
    return Range(low * HEADROOM, high * HEADROOM)


def quantization_error(rows: Array, weights: Sequence[Array], smoothing: Smoothing) -> float:
    """Return the squared error of the products x W with both sides quantized, relative to their squared size."""
    activations = fake_quantize_activation(rows / smoothing.factors, smoothing.limits)
    total = 0.0
    for weight in weights:
        exact = rows @ weight
        product = activations @ fake_quantize_weight(weight * smoothing.factors[:, None], 1)
        total += float(((product - exact) ** 2).sum() / max(float((exact**2).sum()), 1e-30))
    return total


def smooth_tensors(
    channels: Mapping[str, ChannelStatistics], readers: Mapping[str, Sequence[Array]]
) -> dict[str, Smoothing]:
    """Return the smoothing of each tensor for which it pays. readers: the weights that each tensor is multiplied
    with."""
    smoothings = {name: find_smoothing(channels[name], readers[name]) for name in readers}
    return {name: smoothing for name, smoothing in smoothings.items() if smoothing is not None}
