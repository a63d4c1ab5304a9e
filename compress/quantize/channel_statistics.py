"""Per-channel statistics of a tensor: minima and maxima, and a random sample of its rows."""

import numpy as np

from laconic.arrays import Array

SAMPLED_ROWS = 256
"""Rows that are kept, whatever the number of samples."""
ROWS_PER_BATCH = 2


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
        """Reservoir sampling (Vitter, 1985): each row is kept with the same probability."""
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
