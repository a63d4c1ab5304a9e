"""Histograms."""

from bisect import bisect_left
from collections.abc import Sequence

DURATIONS_NS = tuple(
    round(seconds * 1e9)
    for seconds in (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
)
"""Upper bounds of durations in nanoseconds: from what a request costs without an engine to the default deadline."""


class Buckets:
    """A histogram: counts of values by upper bound, and their sum.

    bounds: ascending; larger values have a last count of their own.

    Without a lock: the values of one histogram come from one thread, or under a lock of the caller's.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[int] = DURATIONS_NS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def observe(self, value: int) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
