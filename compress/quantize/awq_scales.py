"""The search for AWQ's scales of inputs: those with which rounded weights have the least error."""

from collections.abc import Iterator, Sequence

import numpy as np

from compress.quantize.plan_rounding import RoundingConfig
from compress.quantize.rounding import output_errors
from laconic.arrays import Array
from laconic.quantization.qparams import INT4_RANGE, expand_scales, fit_grid

EXPONENTS = np.linspace(0, 1, 21)
"""Of the size of the activations, of which the best is taken; 0 leaves a weight as it is."""
LARGEST = 1 << 24
"""Numbers of a weight whose error is measured at once, about."""


def find_scales(
    matrices: Sequence[Array], gram: Array, config: RoundingConfig, shared: Array | None = None
) -> Array | None:
    """Find the scales of the inputs with which weights that share them have the least error together, relative to each
    layer's outputs; None where it is the least without. The paper takes the mean absolute activation for the size of a
    channel; here it is the root of the mean square, of which the second moments are the diagonal.

    matrices: [in, out] each. gram: the mean of x xT over the inputs x, [in, in]. shared: [in] int; inputs with the same
    number get one scale. By default each has its own.
    """
    squares = np.diagonal(gram)
    if shared is not None:
        squares = (np.bincount(shared, squares) / np.bincount(shared).clip(min=1))[shared]
    sizes = np.sqrt(squares).clip(min=1e-8)
    exact = [max(measure_outputs(matrix, gram), 1e-30) for matrix in matrices]

    def measure(factors: Array) -> float:
        pairs = zip(matrices, exact, strict=True)
        return sum(measure_error(matrix, factors, gram, config) / size for matrix, size in pairs)

    best, least = None, measure(np.ones(len(sizes), np.float32))
    for exponent in EXPONENTS[1:]:
        factors = sizes**exponent
        factors = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
        error = measure(factors)
        if error < least:
            best, least = factors, error
    return best


def measure_outputs(matrix: Array, gram: Array) -> float:
    """Measure the mean squared norm of a layer's outputs."""
    return sum(float((part * (gram @ part)).sum()) for part in split_outputs(matrix))


def measure_error(matrix: Array, factors: Array, gram: Array, config: RoundingConfig) -> float:
    """Measure the mean squared error of a layer's outputs with rounded weights. No weight is clipped here: that would
    take 13 times as long."""
    total = 0.0
    for part in split_outputs(matrix):
        scaled = part * factors[:, None]
        scales, zeros = fit_grid(scaled, config.group_size, INT4_RANGE, config.symmetric, clips=False)
        steps = expand_scales(scales, len(part), config.group_size)
        shifts = 0 if zeros is None else expand_scales(zeros, len(part), config.group_size)
        restored = (np.clip(np.rint(scaled / steps + shifts), *INT4_RANGE) - shifts) * steps / factors[:, None]
        total += float(output_errors(part, restored, gram).sum())
    return total


def split_outputs(matrix: Array) -> Iterator[Array]:
    """Yield a weight [in, out] as parts of some outputs, which bound what is in memory."""
    size = max(1, LARGEST // len(matrix))
    yield from (matrix[:, start : start + size] for start in range(0, matrix.shape[1], size))
