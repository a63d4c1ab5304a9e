"""The time that a search may take; what an earlier run was charged for a piece of work counts as it did then."""

import time
from collections.abc import Callable

from laconic.cache import Cache


class Budget:
    """Seconds, of which each piece of work is charged what it took when it was done.

    A run that goes on after a kill is charged for what it finds done as the killed one was; so both decide alike, and
    the kill buys no time. spent: so far. live: whether the last piece was done in this run.
    """

    def __init__(self, seconds: float, cache: Cache, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.spent = 0.0
        self.live = False
        self._cache = cache
        self._clock = clock
        self._mark = clock()
        self._paces: dict[str, float] = {}

    def lap(self, key: str, kind: str = "", units: float = 1) -> float:
        """Charge the seconds since the last lap, or what an earlier run was charged for the piece of work `key`.

        kind, units: what it was and how much of it, for `expected`.
        """
        now = self._clock()
        self.live = False

        def passed() -> float:
            self.live = True
            return now - self._mark

        seconds = float(self._cache.json(f"lap-{key}", passed))
        self._mark = now
        self.spent += seconds
        if kind:
            self._paces[kind] = seconds / units
        return seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - self.spent

    @property
    def overrun(self) -> float:
        """Seconds beyond the budget."""
        return max(-self.left, 0.0)

    def expected(self, kind: str, units: float = 1) -> float | None:
        """Seconds that so much of a kind of work will take, by the last of it; None where there was none."""
        return self._paces[kind] * units if kind in self._paces else None

    def allows(self, kind: str, units: float = 1, *, keep: float = 0.0) -> bool:
        """Whether there is time for so much of a kind of work, and `keep` seconds beyond. What was never done before
        takes any time that is left."""
        return self.left > keep + (self.expected(kind, units) or 0.0)
