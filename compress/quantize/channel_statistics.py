"""What is known of a tensor channel by channel: the extremes, and a few rows to try things on."""

import numpy as np

from laconic.tensor import Array

ROWS = 256
"""Rows kept, whatever the number of samples."""
PER_BATCH = 2


class Channels:
    """Extremes of each channel (the last axis), exact; and rows drawn from all batches alike, in constant memory."""

    def __init__(self, seed: int = 0) -> None:
        self.low: Array | None = None
        self.high: Array | None = None
        self._rows: list[Array] = []
        self._offered = 0
        self._rng = np.random.default_rng(seed)

    def add(self, values: Array) -> None:
        """Look at a batch, [..., channels]."""
        rows = values.reshape(-1, values.shape[-1])
        low, high = rows.min(axis=0), rows.max(axis=0)
        self.low = low if self.low is None else np.minimum(self.low, low)
        self.high = high if self.high is None else np.maximum(self.high, high)
        for index in self._rng.integers(0, len(rows), PER_BATCH):
            self._offer(rows[index].copy())

    def _offer(self, row: Array) -> None:
        """Reservoir sampling (Vitter, 1985): each row offered is kept with the same chance."""
        self._offered += 1
        if len(self._rows) < ROWS:
            self._rows.append(row)
            return
        slot = int(self._rng.integers(0, self._offered))
        if slot < ROWS:
            self._rows[slot] = row

    @property
    def rows(self) -> Array:
        """[rows, channels]."""
        return np.stack(self._rows)

    @property
    def largest(self) -> Array:
        """The largest absolute value of each channel."""
        assert self.low is not None
        assert self.high is not None
        return np.maximum(np.abs(self.low), np.abs(self.high))
