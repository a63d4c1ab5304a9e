"""How many rows a model can answer in a second, measured while it works."""

import math
from dataclasses import dataclass

MEMORY = 2.0
"""Seconds of work after which a batch counts for 1 / e."""


@dataclass
class Throughput:
    """The time of all executors of a model for a row, were their batches full. 0 before the first batch.

    A batch takes `start + per_row * rows` seconds: a line through the last batches, by least squares. A queue holds
    many rows only while batches are full, so the rate of the small batches of quieter times would turn requests away
    that can be answered in time. Where all batches were of one size, rows are taken to cost nothing: too low, until the
    next batch, which is larger if it matters.
    """

    executors: int
    cap: int
    seconds_per_row: float = 0.0
    _count: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def count(self, rows: int, seconds: float) -> None:
        """Count a batch that one executor ran."""
        kept = math.exp(-seconds / MEMORY)
        self._count = kept * self._count + 1
        self._rows = kept * self._rows + rows
        self._seconds = kept * self._seconds + seconds
        self._squares = kept * self._squares + rows * rows
        self._products = kept * self._products + rows * seconds
        spread = self._squares * self._count - self._rows * self._rows
        slope = (self._products * self._count - self._rows * self._seconds) / spread if spread > 1e-9 else 0.0
        per_row = min(max(slope, 0.0), self._seconds / self._rows)
        start = (self._seconds - per_row * self._rows) / self._count
        self.seconds_per_row = (start / self.cap + per_row) / self.executors
