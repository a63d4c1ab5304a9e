"""The time budget of a search, shared by all of its interrupted and resumed runs."""

import time
from collections.abc import Callable

from laconic.cache import Cache


class Budget:
    """A budget in seconds. Each piece of work is charged the time that it took when it was first done.

    A resumed search is charged for cached work what the interrupted run was charged for it. Both therefore make the
    same decisions, and an interruption buys no time. spent: seconds so far. is_fresh: whether the last piece of work
    was done in this run, and not found in the cache.
    """

    def __init__(self, seconds: float, cache: Cache, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.spent = 0.0
        self.is_fresh = False
        self._cache = cache
        self._clock = clock
        self._mark = clock()
        self._rates: dict[str, float] = {}

    def charge(self, key: str, kind: str = "", units: float = 1) -> float:
        """Charge the seconds since the last call, or those that an earlier run was charged for the work `key`.

        kind, units: the kind of work and its amount, for `estimate`. Returns the seconds.
        """
        now = self._clock()
        self.is_fresh = False

        def measure() -> float:
            self.is_fresh = True
            return now - self._mark

        seconds = float(self._cache.json(f"lap-{key}", measure))
        self._mark = now
        self.spent += seconds
        if kind:
            self._rates[kind] = seconds / units
        return seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left; negative beyond the budget."""
        return self.seconds - self.spent

    @property
    def overrun(self) -> float:
        """Seconds beyond the budget."""
        return max(-self.remaining, 0.0)

    def estimate(self, kind: str, units: float = 1) -> float | None:
        """Expected seconds for an amount of a kind of work, from the last of its kind; None before the first."""
        return self._rates[kind] * units if kind in self._rates else None

    def allows(self, kind: str, units: float = 1, *, keep: float = 0.0) -> bool:
        """Whether the budget has time for an amount of a kind of work and `keep` seconds beyond it.

        Work of a kind that was never done before is allowed as long as any time is left.
        """
        return self.remaining > keep + (self.estimate(kind, units) or 0.0)
