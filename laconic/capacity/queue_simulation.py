"""The queue of a server, simulated: random arrivals, one loop that reads and writes, greedy batches, the pace
of the machine."""

import random
from collections.abc import Generator
from typing import Any

import simpy

from laconic.capacity.pace import PacedClock
from laconic.capacity.service_times import ServiceTimes

WARM_UP = 0.1
"""The share of the requests whose times do not count: the queue is empty when the first arrives."""
Process = Generator[Any, Any, None]


class ServerSimulation:
    """One server under a Poisson load. rate: requests a second."""

    def __init__(self, times: ServiceTimes, rate: float, seed: int) -> None:
        self._times = times
        self._rate = rate
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._clock = PacedClock(times.pace, random.Random(seed))  # noqa: S311 - not for secrets
        self._environment = simpy.Environment()
        self._loop = simpy.Resource(self._environment, capacity=1)
        self._queue = simpy.Store(self._environment)
        self._busy = 0
        self._latencies: list[float] = []

    def run(self, requests: int) -> list[float]:
        """Simulate so many requests. Return the time of each, in the order of their answers."""
        for _ in range(self._times.executors):
            self._environment.process(self._execute())
        arrivals = self._environment.process(self._arrive(requests))
        self._environment.run(arrivals)
        while len(self._latencies) < requests:
            self._environment.step()
        return self._latencies

    def _arrive(self, requests: int) -> Process:
        for _ in range(requests):
            yield self._environment.timeout(self._random.expovariate(self._rate))
            self._environment.process(self._request())

    def _request(self) -> Process:
        start = self._environment.now
        yield from self._occupy_loop(self._times.cpu / 2)
        answered = self._environment.event()
        self._queue.put(answered)
        yield answered
        yield from self._occupy_loop(self._times.cpu / 2)
        self._latencies.append(self._environment.now - start + self._times.delay)

    def _occupy_loop(self, seconds: float) -> Process:
        with self._loop.request() as turn:
            yield turn
            yield self._work(seconds)

    def _work(self, seconds: float) -> simpy.Timeout:
        """Wait for the end of work that takes so many seconds at the pace of the machine."""
        now = self._environment.now
        return self._environment.timeout(self._clock.finish(now, seconds) - now)

    def _execute(self) -> Process:
        last = 0
        while True:
            batch = [(yield self._queue.get())]
            while self._queue.items and len(batch) < self._times.cap:
                batch.append(self._queue.items.pop(0))
            self._busy += 1
            seconds = self._find_work(len(batch)) + (self._times.change if len(batch) != last else 0.0)
            last = len(batch)
            if self._times.inline:
                yield from self._occupy_loop(seconds)
            else:
                yield self._work(seconds)
            self._busy -= 1
            for answered in batch:
                answered.succeed()

    def _find_work(self, rows: int) -> float:
        """Find the time of a batch, between those of the only one and of one beside which all executors are busy."""
        alone = self._times.work(rows, together=False)
        others = (self._busy - 1) / max(1, self._times.executors - 1)
        return alone + others * (self._times.work(rows, together=True) - alone)


def simulate(times: ServiceTimes, rate: float, *, requests: int, seed: int = 0) -> list[float]:
    """Return the times of requests to one server, sorted, as a client sees them. rate: requests a second."""
    latencies = ServerSimulation(times, rate, seed).run(requests)
    return sorted(latencies[int(WARM_UP * requests) :])
