"""The number of worker processes, found by measuring the steps of the training itself."""

WARM_UP = 3
"""Steps that are not measured, since the first ones allocate and compile."""
STEPS = 8
SECONDS = 0.5
MOST = 200
"""A count is measured for at least so many steps and seconds, and at most so many steps."""
WORTH = 10.0
"""Expected seconds of waiting below which no worker is started: starting workers takes 2 to 4 s."""
NOTICEABLE = 0.02
"""The share of a step's time below which waiting is ignored."""
BETTER = 0.95
"""The largest time of a step, relative to the best so far, for a count to be kept."""
HOPELESS = 1.25
"""The time of a step with one worker, relative to none, from which two are not tried: the cores are busy."""


class WorkerCountSearch:
    """Tries 0, 1, 2, 4, ... workers during training, for as long as steps wait for data and more workers help.

    workers: the count to use now. seconds: of a step, waiting included, by the count of workers it was measured with.
    settled: whether the search has ended.
    """

    def __init__(self, most: int, prefetch: int) -> None:
        """most: workers to try at most. prefetch: batches that each of them has ready, which are not measured."""
        self.workers = 0
        self.seconds: dict[int, float] = {}
        self.settled = most == 0
        self._most, self._prefetch, self._best = most, prefetch, 0
        self._restart()

    def _restart(self) -> None:
        # The batches that were ready when workers began say nothing about how fast they are.
        self._skip = WARM_UP + self.workers * self._prefetch
        self._steps, self._waited, self._spent = 0, 0.0, 0.0

    def observe(self, waited: float, spent: float, left: int) -> bool:
        """Record a step: the seconds waited for its batch, and all seconds that it took. left: remaining steps.

        Returns whether `workers` has changed.
        """
        if self.settled:
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._steps += 1
        self._waited += waited
        self._spent += spent
        if self._steps < STEPS or (self._spent < SECONDS and self._steps < MOST):
            return False
        before = self.workers
        self._decide(left)
        self._restart()
        return self.workers != before

    def _decide(self, left: int) -> None:
        seconds = self.seconds[self.workers] = self._spent / self._steps
        better = seconds <= BETTER * self.seconds[self._best] or self.workers == self._best
        if better:
            self._best = self.workers
        waits = self._waited >= NOTICEABLE * self._spent and self._waited / self._steps * left >= WORTH
        # One worker that builds batches about as fast as this process did gains nothing yet; two may.
        hopeful = better or (self.workers == 1 and seconds < HOPELESS * self.seconds[self._best])
        if waits and self.workers < self._most and hopeful:
            self.workers = min(max(1, 2 * self.workers), self._most)
        else:
            self.workers, self.settled = self._best, True

    def describe(self) -> str:
        """Describe what was measured, as in "measured 31.0 ms a step with 0, 18.2 ms with 1"."""
        parts = [f"{1000 * seconds:.1f} ms a step with {count}" for count, seconds in sorted(self.seconds.items())]
        return f"measured {', '.join(parts)}" if parts else "too few steps to measure"
