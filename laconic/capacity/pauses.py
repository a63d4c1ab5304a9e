"""Pauses of a machine: times in which nothing of a server runs, since the machine does something else."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

LONG = 3.0
"""How many times the median a service takes that a pause has fallen into."""


@dataclass(frozen=True)
class Pauses:
    """Pauses that were seen. seconds: of each. watched: seconds in which they were looked for, one service after the
    other.

    They are kept apart from the services: a client that waits for its answer sees one slow request a pause, while
    requests that arrive on their own all wait for its end.
    """

    seconds: tuple[float, ...] = ()
    watched: float = 0.0

    @property
    def share(self) -> float:
        """The share of the time that they take."""
        return sum(self.seconds) / self.watched if self.watched else 0.0

    def join(self, other: "Pauses") -> "Pauses":
        """Return the pauses of both."""
        return Pauses(self.seconds + other.seconds, self.watched + other.watched)


NO_PAUSES = Pauses()


def split_pauses(times: Sequence[float]) -> tuple[list[float], Pauses]:
    """Split the times of services, one after the other, into those without a pause and the pauses."""
    middle = median(times)
    plain = [time for time in times if time <= LONG * middle]
    longer = tuple(time - middle for time in times if time > LONG * middle)
    return plain, Pauses(longer, sum(times))


class Pause(NamedTuple):
    """When a pause begins and ends, in seconds."""

    begin: float
    end: float


class PausedClock:
    """When work ends that pauses interrupt, whose beginnings are drawn at random."""

    def __init__(self, pauses: Pauses, rng: random.Random) -> None:
        self._pauses, self._random = pauses, rng
        self._coming: deque[Pause] = deque()
        self._last = 0.0

    def finish(self, start: float, seconds: float) -> float:
        """Return when work ends that begins at `start` and takes so many seconds. Starts never go back in time."""
        end = start + seconds
        self._draw(end)
        while self._coming and self._coming[0].end <= start:
            self._coming.popleft()
        number = 0
        while number < len(self._coming) and self._coming[number].begin < end:
            end += self._coming[number].end - max(self._coming[number].begin, start)
            self._draw(end)
            number += 1
        return end

    def _draw(self, until: float) -> None:
        """Draw the pauses that come up to a time."""
        seen = self._pauses
        while seen.seconds and self._last <= until:
            begin = self._last + self._random.expovariate(len(seen.seconds) / seen.watched)
            self._last = begin + self._random.choice(seen.seconds)
            self._coming.append(Pause(begin, self._last))
