"""The pace of a machine: how fast the same work goes on from one moment to the next, as it was measured.

A machine that others share is slow for a while and fast again, or stands still. A client that waits for its answers
sees that as a few slow requests, while requests that arrive on their own all wait meanwhile. So slowness belongs to
the time, and not to a service: the services of one series are kept in their order.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SHORTEST = 0.005
"""Seconds: services that take less are taken together, up to as many."""


class Stretch(NamedTuple):
    """Seconds in which work goes on at one pace, in seconds of work a second; 1.0 where services take their median."""

    seconds: float
    pace: float


@dataclass(frozen=True)
class Pace:
    """The pace that was measured, in series of stretches that followed one another. Without any, it is always 1.0."""

    series: tuple[tuple[Stretch, ...], ...] = ()

    @property
    def mean(self) -> float:
        """The seconds of work a second, over all the time that was measured."""
        stretches = [stretch for series in self.series for stretch in series]
        if not stretches:
            return 1.0
        return sum(each.seconds * each.pace for each in stretches) / sum(each.seconds for each in stretches)


def measure_pace(middle: float, times: Sequence[float]) -> tuple[Stretch, ...]:
    """Take the pace from the times of services in their order. middle: what such a service takes in the median."""
    groups: list[list[float]] = []
    for time in times:
        if not groups or time >= SHORTEST or sum(groups[-1]) >= SHORTEST:
            groups.append([])
        groups[-1].append(time)
    return tuple(Stretch(sum(group), middle * len(group) / sum(group)) for group in groups)


class PacedClock:
    """When work ends that goes on at the pace of a machine, whose series come in random order."""

    def __init__(self, pace: Pace, rng: random.Random) -> None:
        self._pace, self._random = pace, rng
        self._ends: list[float] = [0.0]
        self._done: list[float] = [0.0]
        """The work that is possible up to each end of a stretch."""

    def finish(self, start: float, seconds: float) -> float:
        """Return when work ends that begins at `start`, and takes so many seconds at a pace of 1.0."""
        if not self._pace.series:
            return start + seconds
        self._draw(self._ends, start)
        place = bisect_right(self._ends, start) - 1
        done = self._done[place] + (start - self._ends[place]) * self._slope(place) + seconds
        self._draw(self._done, done)
        place = bisect_right(self._done, done) - 1
        return max(start, self._ends[place] + (done - self._done[place]) / self._slope(place))  # rounding

    def _slope(self, place: int) -> float:
        """The pace of the stretch behind an end."""
        return (self._done[place + 1] - self._done[place]) / (self._ends[place + 1] - self._ends[place])

    def _draw(self, reached: list[float], value: float) -> None:
        """Draw series until their ends, or the work up to them, lie behind a value."""
        while reached[-1] <= value:
            for stretch in self._random.choice(self._pace.series):
                self._ends.append(self._ends[-1] + stretch.seconds)
                self._done.append(self._done[-1] + stretch.seconds * stretch.pace)
