"""Statistics of a tensor over any number of batches in constant memory: a histogram of its values, and minima, maxima
and a sample of rows by channel."""

import numpy as np

from laconic.arrays import Array

BINS = 8192
"""32 bins for each of the 256 levels when the range is used in full."""

SMALLEST = 1e-30
"""Smaller values are counted as zero, as the width of a bin would underflow."""

SAMPLED_ROWS = 256
"""Rows that are kept, whatever the number of samples."""
ROWS_PER_BATCH = 2


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
        """Return the quantile for a share of the values, to within a bin."""
        edge = int(np.searchsorted(np.cumsum(self.counts), share * self.counts.sum()))
        return float(np.clip(self.centres[min(edge, BINS - 1)], self.low, self.high))


class ChannelStatistics:
    """Exact minimum and maximum of each channel (the last axis), and a uniform sample of rows, in constant memory."""

    def __init__(self, seed: int = 0) -> None:
        self.low: Array = np.full(1, np.inf, np.float32)
        self.high: Array = np.full(1, -np.inf, np.float32)
        self._rows: list[Array] = []
        self._offered = 0
        self._rng = np.random.default_rng(seed)

    def add(self, values: Array) -> None:
        """Observe a batch, [..., channels]."""
        rows = values.reshape(-1, values.shape[-1])
        self.low = np.minimum(self.low, rows.min(axis=0))
        self.high = np.maximum(self.high, rows.max(axis=0))
        for index in self._rng.integers(0, len(rows), ROWS_PER_BATCH):
            self._offer(rows[index].copy())

    def _offer(self, row: Array) -> None:
        """Sample from a reservoir (Vitter, 1985): each row is kept with the same probability."""
        self._offered += 1
        if len(self._rows) < SAMPLED_ROWS:
            self._rows.append(row)
            return
        slot = int(self._rng.integers(0, self._offered))
        if slot < SAMPLED_ROWS:
            self._rows[slot] = row

    @property
    def rows(self) -> Array:
        """The sampled rows, [rows, channels]."""
        return np.stack(self._rows)

    @property
    def absolute_max(self) -> Array:
        """The largest absolute value of each channel, [channels]."""
        return np.maximum(np.abs(self.low), np.abs(self.high))
