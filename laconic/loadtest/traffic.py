"""Requests to a server, from clients that each wait for their answer (closed loop) or at a rate (open loop).

A closed loop slows down with the server, so it finds the throughput and hides the queue. An open loop sends a request
when it is due, whether others are answered or not, and counts its latency from then: the time that a request would have
waited for a busy connection is not left out ("coordinated omission").
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple
from urllib.parse import SplitResult

from pydantic import BaseModel, ConfigDict

from laconic.loadtest.http_client import ConnectionFailed, HttpClient

OK = "200"
TIMEOUT = "timeout"
LOST = "connection lost"


class Sample(NamedTuple):
    """A request. due, ended: by the clock of `time.monotonic`. outcome: its status, TIMEOUT or LOST."""

    due: float
    ended: float
    outcome: str


class Load:
    """Sends requests to one server, in turn. requests: whole, with their headers. timeout: seconds for an answer."""

    def __init__(self, url: SplitResult, requests: Sequence[bytes], *, timeout: float = 30.0) -> None:
        self.url = url
        self.timeout = timeout
        self._requests = cycle(requests)
        self._idle: list[HttpClient] = []
        self._samples: list[Sample] = []

    async def run_closed(self, clients: int, seconds: float) -> list[Sample]:
        """Load by so many clients, each of which sends its next request when it has its answer, and one at least."""
        end = time.monotonic() + seconds

        async def send_in_turn() -> None:
            await self._send(time.monotonic())
            while (due := time.monotonic()) < end:
                await self._send(due)

        await asyncio.gather(*(send_in_turn() for _ in range(clients)))
        return self._take_samples()

    async def run_open(self, rate: float, seconds: float, *, seed: int = 0) -> list[Sample]:
        """Load by requests that arrive at random, `rate` of them a second in the mean (a Poisson process)."""
        arrivals = random.Random(seed)  # noqa: S311 - not for secrets
        start = time.monotonic()
        due, tasks = start + arrivals.expovariate(rate), []
        while due < start + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self._send(due)))
            due += arrivals.expovariate(rate)
        await asyncio.gather(*tasks)
        return self._take_samples()

    def _take_samples(self) -> list[Sample]:
        for client in self._idle:
            client.close()
        self._idle.clear()
        samples, self._samples = self._samples, []
        return samples

    async def _send(self, due: float) -> None:
        """Send one request, on a connection of its own while it is under way."""
        try:
            async with asyncio.timeout(self.timeout):
                client = await self._connect()
                answer = await client.send(next(self._requests))
            outcome = str(answer.status)
            self._idle.append(client)
        except TimeoutError:
            outcome = TIMEOUT
        except ConnectionFailed:
            outcome = LOST
        self._samples.append(Sample(due, time.monotonic(), outcome))

    async def _connect(self) -> HttpClient:
        while self._idle:
            client = self._idle.pop()
            if client.usable:
                return client
        return await HttpClient.connect(self.url)


def find_percentile(times: Sequence[float], percent: float) -> float:
    """Find the smallest of the sorted values that so many percent are not larger than."""
    return times[max(0, -int(-len(times) * percent // 100) - 1)]


PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class LoadPoint(BaseModel):
    """The result of one load.

    load: "clients" (closed loop) or "rate" (open loop, requests per second), and `value` its size. seconds: from the
    first request to the last answer. requests: all that were sent. goodput: answers with status 200 per second.
    latencies: of these, in milliseconds, by percentile; in an open loop from the time that the request was due. errors:
    requests without such an answer, by status or reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    load: str
    value: float
    seconds: float
    requests: int
    goodput: float
    latencies: dict[str, float]
    errors: dict[str, int]

    @classmethod
    def of(cls, load: str, value: float, samples: Sequence[Sample]) -> "LoadPoint":
        """Summarize the samples of one load."""
        seconds = max(sample.ended for sample in samples) - min(sample.due for sample in samples)
        times = sorted(sample.ended - sample.due for sample in samples if sample.outcome == OK)
        return cls(
            load=load,
            value=value,
            seconds=seconds,
            requests=len(samples),
            goodput=len(times) / seconds,
            latencies={f"p{percent:g}": 1e3 * find_percentile(times, percent) for percent in PERCENTILES if times},
            errors=dict(Counter(sample.outcome for sample in samples if sample.outcome != OK)),
        )
