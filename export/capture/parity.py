"""Parity of two sessions that should compute the same outputs."""

from collections.abc import Iterable

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import CaptureError
from laconic.runtimes.runtime import Session

PARITY = 1e-4
"""The largest difference allowed, relative to the largest output. Measured: 1e-7 for tiny models, 1e-6 for MiniLM."""


def largest_difference(reference: Session, candidate: Session, batches: Iterable[Arrays]) -> float:
    """Compute the largest difference between two sessions, relative to the largest value of each output over all
    batches: a single score may be as near to zero as the rounding of the sums behind it.

    Raises CaptureError if shapes differ.
    """
    worst: dict[str, float] = {}
    scales: dict[str, float] = {}
    for inputs in batches:
        expected, found = reference.run(inputs), candidate.run(inputs)
        for name, array in expected.items():
            worst[name] = max(worst.get(name, 0.0), absolute_difference(name, array, found[name]))
            scales[name] = max(scales.get(name, 0.0), largest_value(array))
    return max((worst[name] / (scales[name] or 1.0) for name in worst), default=0.0)


def relative_difference(expected: Arrays, found: Arrays) -> float:
    """Compute the largest difference between outputs by name, relative to the largest value of each.

    Raises CaptureError if shapes differ.
    """
    differences = (
        absolute_difference(name, array, found[name]) / (largest_value(array) or 1.0)
        for name, array in expected.items()
    )
    return max(differences, default=0.0)


def largest_value(array: Array) -> float:
    """The largest absolute value; 0 for an empty array."""
    return float(np.max(np.abs(array), initial=0.0))


def absolute_difference(name: str, expected: Array, found: Array) -> float:
    """The largest difference of an output; infinite where only one of the two is NaN.

    Raises CaptureError if shapes differ.
    """
    if expected.shape != found.shape:
        raise CaptureError(
            f"output {name!r} of the graph has shape {list(found.shape)}, expected {list(expected.shape)}: "
            f"a dynamic axis was captured as fixed"
        )
    difference = float(np.max(np.abs(expected.astype(np.float64) - found), initial=0.0))
    return float("inf") if np.isnan(difference) else difference
