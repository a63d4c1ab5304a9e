"""The relative error of a tensor over several samples."""

import numpy as np

from laconic.arrays import Array


class ErrorSum:
    """The relative error of a tensor over several samples: the norm of the differences, by that of the values."""

    def __init__(self) -> None:
        self._differences = self._values = 0.0

    def add(self, found: Array, expected: Array) -> None:
        """Add a sample's values. Equal infinities are no difference; NaN in only one of the two is an infinite one."""
        a, b = found.astype(np.float64), expected.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        # What the exporter writes for minus infinity in a mask has a square beyond float32, and not beyond float64.
        difference = np.where(same, 0.0, a - np.where(same, 0.0, b))
        self._differences += float("inf") if np.isnan(difference).any() else float(np.square(difference).sum())
        self._values += float(np.square(b[np.isfinite(b)]).sum())

    @property
    def relative(self) -> float:
        """The relative error: 0 for equal values, infinite where zeros were expected and others found."""
        if self._differences == 0:
            return 0.0
        return float(np.sqrt(self._differences / self._values)) if self._values else float("inf")
