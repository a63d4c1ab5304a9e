"""Whether two sessions of what should be one model give the same answers."""

from collections.abc import Iterable

import numpy as np

from laconic.errors import CaptureError
from laconic.runtimes.runtime import Session
from laconic.tensor import Arrays

PARITY = 1e-4
"""The largest difference allowed, relative to the largest answer. Tiny models measure 1e-7, MiniLM 1e-6."""


def largest_difference(reference: Session, candidate: Session, batches: Iterable[Arrays]) -> float:
    """The largest difference between the two sessions' answers, relative to the largest answer of each output.

    Raises CaptureError where even the shapes differ.
    """
    worst = 0.0
    for inputs in batches:
        expected, found = reference.run(inputs), candidate.run(inputs)
        for name, array in expected.items():
            if array.shape != found[name].shape:
                raise CaptureError(
                    f"output {name!r} of the graph has shape {list(found[name].shape)}, expected {list(array.shape)}: "
                    f"an axis was taken as fixed"
                )
            scale = float(np.max(np.abs(array), initial=0.0)) or 1.0
            difference = np.max(np.abs(array.astype(np.float64) - found[name]), initial=0.0)
            # NaN on one side only is a difference, and the largest there is.
            worst = max(worst, float("inf") if np.isnan(difference) else float(difference) / scale)
    return worst
