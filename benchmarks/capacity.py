"""What `laconic size` predicts beside a load test of the same server: the p99 at three rates.

    python benchmarks/capacity.py ARTIFACT [--threads N] [--runs 5]

Each run starts a server, and in turn measures its service times and loads it, at 30, 50 and 70 % of its capacity in
the first run. A load is predicted by the measurements before and behind it, since the pace of a machine changes within
minutes. The medians of the runs count; the load of the machine says whether they can be trusted.
"""

import asyncio
import os
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

from results import Results, make_parser

from laconic.artifacts.artifact import Artifact
from laconic.capacity.service_times import ServiceTimes, pool
from laconic.capacity.sizing import predict_p99
from laconic.commands.capacity import probe
from laconic.commands.http_session import StartedServer, start_server
from laconic.commands.load import find_model
from laconic.hardware import cores
from laconic.loadtest.http_client import HttpClient
from laconic.loadtest.traffic import Load, LoadPoint

SHARES = (0.3, 0.5, 0.7)
"""Of the capacity."""
SECONDS = 20.0
"""Of each load."""


async def load(server: StartedServer, model: str, length: int, rate: float, seed: int) -> LoadPoint:
    """Load the server at a rate."""
    place = urlsplit(f"http://{server.host}:{server.port}")
    with closing(await HttpClient.connect(place)) as client:
        served = await find_model(client, place, model, None)
        requests = list(served.make_tensor_requests(await served.read_inputs(client), length))
    return LoadPoint.of("rate", rate, await Load(place, requests).run_open(rate, SECONDS, seed=seed))


class Comparison(NamedTuple):
    """A load beside its prediction. p99s in milliseconds."""

    rate: float
    loaded: float
    predicted: float


def run(artifact: Artifact, threads: int, length: int, rates: list[float], number: int) -> list[Comparison]:
    """Measure and load one server, in turn, and predict each load by the measurements before and behind it. rates: of
    the loads; where there are none yet, they are made from the first measurement."""
    with start_server(artifact, "--threads", str(threads), "--queue-seconds", "60") as server:

        def measure() -> ServiceTimes:
            return pool(asyncio.run(probe(server, artifact.name, length=length, seconds=0.5, rounds=2)))

        before, comparisons = measure(), []
        for place, rate in enumerate(rates or [share * before.capacity for share in SHARES]):
            point = asyncio.run(load(server, artifact.name, length, rate, len(SHARES) * number + place))
            after = measure()
            predicted = 1e3 * predict_p99(pool([before, after]), rate)
            comparisons.append(Comparison(rate, point.latencies["p99"], predicted))
            print(
                f"run {number}: {rate:.0f}/s, capacity {before.capacity:.0f} and {after.capacity:.0f}/s, pace "
                f"{before.pace.mean:.2f}, batches of {before.cap}, server {1e3 * before.cpu:.3f} ms; predicted "
                f"{predicted:.1f}, loaded {point.latencies['p99']:.1f} ms, load average {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            before = after
    return comparisons


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    artifact = Artifact.load(arguments.artifact)
    results = Results(publish=arguments.publish)
    runs: list[list[Comparison]] = []
    for number in range(arguments.runs):
        rates = [each.rate for each in runs[0]] if runs else []
        runs.append(run(artifact, arguments.threads, arguments.length, rates, number))
    rows = []
    for share, same in zip(SHARES, zip(*runs, strict=True), strict=True):
        loaded, predicted = median(each.loaded for each in same), median(each.predicted for each in same)
        spread = f"{min(each.loaded for each in same):.1f} to {max(each.loaded for each in same):.1f}"
        label = f"{same[0].rate:.0f}/s ({share:.0%})"
        rows.append([label, f"{loaded:.1f}", spread, f"{predicted:.1f}", f"{predicted / loaded - 1:+z.0%}"])
    results.table("p99", ["rate", "p99 of the load test, ms", "lowest and highest", "predicted, ms", "error"], rows)


if __name__ == "__main__":
    main()
