"""Parity of two sessions that should compute the same outputs."""

from collections.abc import Callable, Iterable

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import CaptureError
from laconic.runtimes.runtime import Session

PARITY = 1e-4
"""The largest difference allowed, relative to the largest output. Measured: 1e-7 for tiny models, 1e-6 for MiniLM."""


Align = Callable[[Arrays, Arrays], Arrays]
"""Takes the expected outputs and those that were found; returns the latter in the order of the former."""


def keep_order(expected: Arrays, actual: Arrays) -> Arrays:
    """Return the outputs as they were found."""
    return actual


def largest_difference(
    reference: Session, candidate: Session, batches: Iterable[Arrays], align: Align = keep_order
) -> float:
    """Compute the largest difference between two sessions, relative to the largest value of each output over all
    batches: a single score may be as near to zero as the rounding of the sums behind it.

    align: puts outputs whose order says nothing in the order of the reference's. Raises CaptureError if shapes differ.
    """
    worst: dict[str, float] = {}
    scales: dict[str, float] = {}
    for inputs in batches:
        expected, actual = reference.run(inputs), candidate.run(inputs)
        check_shapes(expected, actual)
        actual = align(expected, actual)
        for name, array in expected.items():
            worst[name] = max(worst.get(name, 0.0), absolute_difference(name, array, actual[name]))
            scales[name] = max(scales.get(name, 0.0), largest_value(array))
    return max((worst[name] / (scales[name] or 1.0) for name in worst), default=0.0)


def relative_difference(expected: Arrays, actual: Arrays, align: Align = keep_order) -> float:
    """Compute the largest difference between outputs by name, relative to the largest value of each.

    align: see `largest_difference`. Raises CaptureError if shapes differ.
    """
    check_shapes(expected, actual)
    actual = align(expected, actual)
    differences = (
        absolute_difference(name, array, actual[name]) / (largest_value(array) or 1.0)
        for name, array in expected.items()
    )
    return max(differences, default=0.0)


def largest_value(array: Array) -> float:
    """Return the largest absolute value of those that are finite; 0 where there are none."""
    return float(np.max(np.abs(array[np.isfinite(array)]), initial=0.0))


def check_shapes(expected: Arrays, actual: Arrays) -> None:
    """Raise CaptureError if shapes differ."""
    for name, array in expected.items():
        if array.shape != actual[name].shape:
            raise CaptureError(
                f"output {name!r} of the graph has shape {list(actual[name].shape)}, expected {list(array.shape)}: "
                f"a dynamic axis was captured as fixed"
            )


def absolute_difference(name: str, expected: Array, found: Array) -> float:
    """Compute the largest difference of an output: equal infinities are none, nor is NaN in both; in one alone it is
    infinite.

    Raises CaptureError if shapes differ.
    """
    check_shapes({name: expected}, {name: found})
    a, b = expected.astype(np.float64), found.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    difference = float(np.max(np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b)), initial=0.0))
    return float("inf") if np.isnan(difference) else difference
