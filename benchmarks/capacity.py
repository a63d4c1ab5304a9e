"""What `laconic size` predicts beside a load test of the same server: the p99 at three rates.

    python benchmarks/capacity.py ARTIFACT [--threads N] [--runs 5]

Each run starts a server, measures its service times, and loads it at 30, 50 and 70 % of its capacity. The medians of
the runs count; the load of the machine says whether they can be trusted.
"""

import argparse
import asyncio
import os
from contextlib import closing
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from judge import print_machine
from run import table

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
SECONDS = 15.0
"""Of each load."""


async def load(server: StartedServer, model: str, length: int, rates: list[float]) -> list[LoadPoint]:
    """Load the server at these rates, in turn."""
    place = urlsplit(f"http://{server.host}:{server.port}")
    with closing(await HttpClient.connect(place)) as client:
        served = await find_model(client, place, model, None)
        requests = list(served.make_tensor_requests(await served.read_inputs(client), length))
    points = []
    for number, rate in enumerate(rates):
        samples = await Load(place, requests).run_open(rate, SECONDS, seed=number)
        points.append(LoadPoint.of("rate", rate, samples))
    return points


def run(artifact: Artifact, threads: int, length: int, rates: list[float]) -> tuple[ServiceTimes, list[LoadPoint]]:
    """Measure and load one server. rates: of the load; where there are none yet, they are made from the measurement."""
    with start_server(artifact, "--threads", str(threads), "--queue-seconds", "60") as server:
        measured = pool(asyncio.run(probe(server, artifact.name, length=length, seconds=0.5, rounds=3)))
        rates = rates or [share * measured.capacity for share in SHARES]
        return measured, asyncio.run(load(server, artifact.name, length, rates))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    artifact = Artifact.load(arguments.artifact)
    print_machine()
    predicted: list[list[float]] = [[] for _ in SHARES]
    loaded: list[list[float]] = [[] for _ in SHARES]
    rates: list[float] = []
    for number in range(arguments.runs):
        measured, points = run(artifact, arguments.threads, arguments.length, rates)
        rates = [point.value for point in points]
        for place, point in enumerate(points):
            predicted[place].append(1e3 * predict_p99(measured, point.value))
            loaded[place].append(point.latencies["p99"])
        print(
            f"run {number}: capacity {measured.capacity:.0f}/s, {measured.executors} executors, batches of "
            f"{measured.cap}, server {1e3 * measured.cpu:.3f} ms + {1e3 * measured.delay:.3f} ms; predicted "
            f"{[round(each[-1], 1) for each in predicted]}, loaded {[round(each[-1], 1) for each in loaded]} ms, load "
            f"average {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    rows = []
    for share, rate, theirs, ours in zip(SHARES, rates, loaded, predicted, strict=True):
        error = median(ours) / median(theirs) - 1
        rows.append([f"{rate:.0f}/s ({share:.0%})", f"{median(theirs):.1f}", f"{median(ours):.1f}", f"{error:+.0%}"])
    table(["rate", "p99 of the load test, ms", "predicted, ms", "error"], rows)


if __name__ == "__main__":
    main()
