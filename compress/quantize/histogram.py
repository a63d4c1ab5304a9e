"""A histogram observer: counts a tensor's values over any number of batches in constant memory."""

import numpy as np

from laconic.arrays import Array

BINS = 8192
"""32 bins for each of the 256 levels when the range is used in full."""

SMALLEST = 1e-30
"""Smaller values are counted as zero, as the width of a bin would underflow."""


class Histogram:
    """Counts over [-reach, reach]; low and high are the exact minimum and maximum.

    When a value falls outside, the reach is doubled and neighbouring bins are merged, so earlier batches are not needed
    again. counted: without it only the minimum and maximum are kept, which is all that min-max calibration asks for.
    """

    def __init__(self, *, counted: bool = True) -> None:
        self.counted = counted
        self.low = np.inf
        self.high = -np.inf
        self.reach = 0.0
        self.counts = np.zeros(BINS, np.int64)

    def add(self, values: Array) -> None:
        """Count the values of a batch; values that are not finite are left out."""
        values = values.reshape(-1).astype(np.float32, copy=False)
        low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
        if not (np.isfinite(low) and np.isfinite(high)):
            values = values[np.isfinite(values)]
            if not values.size:
                return
            low, high = float(values.min()), float(values.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        if not self.counted:
            return
        self._grow(max(-low, high))
        if self.reach == 0.0:
            self.counts[BINS // 2] += values.size
            return
        index = ((values + np.float32(self.reach)) * np.float32(BINS / (2 * self.reach))).astype(np.int64)
        self.counts += np.bincount(np.clip(index, 0, BINS - 1), minlength=BINS)

    def _grow(self, reach: float) -> None:
        if self.reach == 0.0:
            self.reach = float(2.0 ** np.ceil(np.log2(reach))) if reach > SMALLEST else 0.0
            return
        while reach > self.reach:
            merged = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.zeros(BINS, np.int64)
            self.counts[BINS // 4 : 3 * BINS // 4] = merged
            self.reach *= 2

    @property
    def is_empty(self) -> bool:
        """Whether no finite value was seen."""
        return self.low > self.high

    @property
    def centres(self) -> Array:
        """The middle of each bin."""
        width = 2 * self.reach / BINS
        return np.asarray(-self.reach + width * (np.arange(BINS) + 0.5))

    def quantile(self, share: float) -> float:
        """The quantile for a share of the values, to within a bin."""
        edge = int(np.searchsorted(np.cumsum(self.counts), share * self.counts.sum()))
        return float(np.clip(self.centres[min(edge, BINS - 1)], self.low, self.high))
