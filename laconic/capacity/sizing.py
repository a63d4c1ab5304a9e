"""How many servers a rate takes so that a share of the requests is answered in time."""

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from laconic.capacity.queue_simulation import simulate
from laconic.capacity.service_times import ServiceTimes, pool
from laconic.loadtest.traffic import find_percentile

REQUESTS = 8000
"""Simulated requests of each load: 72 of those that count lie above the 99th percentile."""
PERCENT = 99.0
SATURATED = 0.98
"""The share of the capacity from which on a queue has no end."""
SHARES = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of the capacity: the loads of the curve."""
FEWEST = 0.01
"""The share of the capacity at which requests hardly meet: what no number of replicas can improve on."""


class LoadForecast(BaseModel):
    """What a load on one replica would do. rate: requests a second. utilization: of its capacity. p99: in seconds, and
    its range over the rounds of measurements; None where a replica is saturated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rate: float
    utilization: float
    p99: float | None
    p99_range: tuple[float | None, float | None]


class Sizing(BaseModel):
    """The replicas that a load takes.

    replicas: by all measurements together. replicas_range: over their rounds; None where a round allows no number.
    cores: of each replica. forecast: of the load on one of them. curve: of other loads on one replica.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rate: float
    p99: float
    cores: int
    replicas: int | None
    replicas_range: tuple[int | None, int | None]
    forecast: LoadForecast
    curve: tuple[LoadForecast, ...]


def size_replicas(rounds: Sequence[ServiceTimes], rate: float, p99: float, cores: int) -> Sizing:
    """Find the replicas for a rate of requests, 99 % of which are answered in `p99` seconds. cores: of each replica.

    The requests are spread over the replicas at random.
    """
    times = pool(rounds)
    replicas = find_replicas(times, rate, p99)
    counts = [replicas, *(find_replicas(each, rate, p99) for each in rounds)]
    possible = [count for count in counts if count is not None]
    most = None if None in counts else max(possible)
    share = rate / replicas if replicas else FEWEST * times.capacity
    return Sizing(
        rate=rate,
        p99=p99,
        cores=cores,
        replicas=replicas,
        replicas_range=(min(possible, default=None), most),
        forecast=forecast(rounds, share),
        curve=tuple(forecast(rounds, part * times.capacity) for part in SHARES),
    )


def find_replicas(times: ServiceTimes, rate: float, p99: float) -> int | None:
    """Find the fewest servers that answer in time; None where even requests that never meet take longer."""
    if predict_p99(times, FEWEST * times.capacity) > p99:
        return None
    low = max(0, math.ceil(rate / (SATURATED * times.capacity)) - 1)  # too few
    high = low + 1
    while predict_p99(times, rate / high) > p99:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if predict_p99(times, rate / middle) > p99:
            low = middle
        else:
            high = middle
    return high


def predict_p99(times: ServiceTimes, rate: float) -> float:
    """Predict the 99th percentile of a server's latencies; infinite where it is saturated."""
    if rate >= SATURATED * times.capacity:
        return math.inf
    return find_percentile(simulate(times, rate, requests=REQUESTS), PERCENT)


def forecast(rounds: Sequence[ServiceTimes], rate: float) -> LoadForecast:
    """Forecast a load on one replica, by all measurements and by each round of them."""
    times = pool(rounds)
    each = [predict_p99(one, rate) for one in rounds]
    p99 = predict_p99(times, rate)
    low, middle, high = (value if math.isfinite(value) else None for value in (min(p99, *each), p99, max(p99, *each)))
    return LoadForecast(rate=rate, utilization=rate / times.capacity, p99=middle, p99_range=(low, high))
