"""Histograms."""

from bisect import bisect_left
from collections.abc import Sequence

DURATIONS_NS = tuple(
    round(milliseconds * 1e6)
    for milliseconds in (
        *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 25, 35, 50, 75, 100, 150, 200, 250, 350, 500),
        *(1_000, 2_500, 5_000, 10_000, 30_000, 60_000),
    )
)
"""Upper bounds of durations in nanoseconds: from what a request costs without an engine to the default deadline. They
are closest where the goals of users lie, since a percentile is known only to the bucket that it falls into."""


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
