"""Parity of two sessions that should compute the same outputs."""

from collections.abc import Iterable

import numpy as np

from laconic.arrays import Arrays
from laconic.errors import CaptureError
from laconic.runtimes.runtime import Session

PARITY = 1e-4
"""The largest difference allowed, relative to the largest output. Measured: 1e-7 for tiny models, 1e-6 for MiniLM."""


def largest_difference(reference: Session, candidate: Session, batches: Iterable[Arrays]) -> float:
    """Compute the largest difference between two sessions, relative to the largest value of each output.

    Raises CaptureError if shapes differ.
    """
    return max((relative_difference(reference.run(inputs), candidate.run(inputs)) for inputs in batches), default=0.0)


def relative_difference(expected: Arrays, found: Arrays) -> float:
    """Compute the largest difference between outputs by name, relative to the largest value of each.

    Raises CaptureError if shapes differ.
    """
    worst = 0.0
    for name, array in expected.items():
        if array.shape != found[name].shape:
            raise CaptureError(
                f"output {name!r} of the graph has shape {list(found[name].shape)}, expected {list(array.shape)}: "
                f"a dynamic axis was captured as fixed"
            )
        scale = float(np.max(np.abs(array), initial=0.0)) or 1.0
        difference = np.max(np.abs(array.astype(np.float64) - found[name]), initial=0.0)
        # NaN in only one of the two counts as an infinite difference.
        worst = max(worst, float("inf") if np.isnan(difference) else float(difference) / scale)
    return worst
