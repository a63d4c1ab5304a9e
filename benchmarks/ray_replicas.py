"""What clients see of replicas on a Ray cluster: the same bytes, a replica killed, the load rising, requests a second.

    python benchmarks/ray_replicas.py ARTIFACT [same] [killed] [scaled] [rates]

Starts `laconic serve ARTIFACT --on ray` on this machine for each. A client tries once more after a lost connection and
after status 500, 502 and 503: HAProxy answers 500 for a replica that is gone. `rates` is of 16 clients, beside Ray's
own proxy and the server without Ray; with an echo for an artifact it shows what Ray costs.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil
from results import Results, make_parser

from laconic.commands.load import find_model
from laconic.loadtest.http_client import ConnectionFailed, HttpClient
from laconic.loadtest.traffic import LOST, OK, Load, LoadPoint
from serve.asgi.listener import bind

REPLICA = "ray::ServeReplica"
RETRIED = {LOST, "500", "502", "503"}
START = 180
"""Seconds in which a cluster has to start."""
SCALING = ["--max-replicas", "3", "--target-ongoing", "4", "--scale-up-after", "2", "--scale-down-after", "5"]


@dataclass
class Served:
    """A server at work. requests: what its model takes."""

    process: psutil.Process
    url: str
    requests: list[bytes] = field(default_factory=list)

    def replicas(self) -> list[psutil.Process]:
        """The processes of the replicas, of this cluster alone."""
        return [each for each in self.process.children(recursive=True) if is_replica(each)]


@dataclass
class Tally:
    """What clients saw. first: outcomes of requests; final: of the last try of each, by time."""

    first: Counter[str] = field(default_factory=Counter)
    final: Counter[str] = field(default_factory=Counter)
    bodies: set[bytes] = field(default_factory=set)


def is_replica(process: psutil.Process) -> bool:
    """Whether a process is a replica of Ray Serve."""
    try:
        return any(REPLICA in word for word in process.cmdline())
    except psutil.Error:
        return False


@contextmanager
def serving(artifact: str, *options: str, **environment: str) -> Iterator[Served]:
    """Serve the artifact under the name `model`, on a free port, until the block ends."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "laconic", "serve", f"model={artifact}", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | environment, text=True)
    watchdog = threading.Timer(START, process.kill)
    watchdog.start()
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        watchdog.cancel()
        assert line.startswith("Serving"), f"the server said {line!r}"
        served = Served(psutil.Process(process.pid), f"http://127.0.0.1:{port}")
        served.requests = asyncio.run(make_requests(served.url))
        yield served
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        process.stdout.close()
        assert code == 0, f"the server ended with {code}"


async def make_requests(url: str) -> list[bytes]:
    """Make requests of one row by the signature of the only model."""
    place = urlsplit(url)
    with closing(await HttpClient.connect(place)) as client:
        model = await find_model(client, place, "model", None)
        return list(model.make_tensor_requests(await model.read_inputs(client), 32))


async def send(url: str, client: HttpClient | None, request: bytes) -> tuple[HttpClient | None, str, bytes]:
    """Send a request on a connection, or on a new one. Returns the connection while it lasts, the outcome, the body."""
    try:
        client = client if client is not None and client.usable else await HttpClient.connect(urlsplit(url))
        answer = await client.send(request)
    except ConnectionFailed:
        return None, LOST, b""
    return client, str(answer.status), answer.body


async def ask(served: Served, clients: int, seconds: float) -> Tally:
    """Load by clients in closed loops, each of which tries once more after what may be another replica's to answer."""
    tally, end = Tally(), time.monotonic() + seconds

    async def ask_in_turn() -> None:
        client = None
        while time.monotonic() < end:
            client, outcome, body = await send(served.url, client, served.requests[0])
            tally.first[outcome] += 1
            if outcome in RETRIED:
                await asyncio.sleep(0.05)
                client, outcome, body = await send(served.url, client, served.requests[0])
            tally.final[outcome] += 1
            tally.bodies.add(body)
        if client is not None:
            client.close()

    await asyncio.gather(*(ask_in_turn() for _ in range(clients)))
    return tally


def measure_kill(served: Served, seconds: float, clients: int = 8) -> Tally:
    """Kill a replica by SIGKILL in the middle of a load."""
    killer = threading.Timer(seconds / 2, served.replicas()[0].kill)
    killer.start()
    tally = asyncio.run(ask(served, clients, seconds))
    killer.join()
    return tally


def measure_scaling(served: Served, seconds: float = 60.0) -> tuple[Tally, int, int]:
    """Load with 24 clients and then with one, as long. Returns what they saw, the most replicas, and those at the
    end."""
    counts: list[int] = []
    stopped = threading.Event()

    def count() -> None:
        while not stopped.wait(0.5):
            counts.append(len(served.replicas()))

    counter = threading.Thread(target=count)
    counter.start()
    total = Tally()
    for clients in (24, 1):
        tally = asyncio.run(ask(served, clients, seconds))
        total.first += tally.first
        total.final += tally.final
    stopped.set()
    counter.join()
    return total, max(counts), counts[-1]


async def load(served: Served) -> str:
    """Load with 16 clients. Returns the requests a second and the errors."""
    samples = await Load(urlsplit(served.url), served.requests).run_closed(16, 8.0)
    point = LoadPoint.of("clients", 16, samples)
    return f"{point.goodput:.0f} requests a second, errors {point.errors or 'none'}"


def describe(tally: Tally) -> str:
    """Format what clients saw."""
    failed = [sum(count for outcome, count in each.items() if outcome != OK) for each in (tally.first, tally.final)]
    outcomes = json.dumps({outcome: count for outcome, count in tally.first.items() if outcome != OK})
    return f"{sum(tally.final.values())} requests, {failed[0]} failed at first {outcomes}, {failed[1]} after one retry"


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact")
    parser.add_argument("what", nargs="*", default=["same", "killed", "scaled", "rates"])
    arguments = parser.parse_args()
    artifact, results = arguments.artifact, Results(publish=arguments.publish)
    results.begin("replicas", ["what", "figures"])
    if {"same", "killed"} & set(arguments.what):
        with serving(artifact, "--on", "ray", "--replicas", "2") as served:
            if "same" in arguments.what:
                bodies = asyncio.run(ask(served, 1, 3)).bodies
                with serving(artifact, "--threads", "1") as bare:
                    same = asyncio.run(ask(bare, 1, 3)).bodies == bodies and len(bodies) == 1
                results.add("replicas", ["same bytes as without Ray", str(same)])
            if "killed" in arguments.what:
                results.add("replicas", ["killed", describe(measure_kill(served, 20.0))])
    if "scaled" in arguments.what:
        with serving(artifact, "--on", "ray", *SCALING) as served:
            tally, most, last = measure_scaling(served)
            results.add("replicas", [f"scaled: 1 to {most} to {last} replicas", describe(tally)])
    if "rates" in arguments.what:
        for name, options, proxy in (
            ("without Ray", ["--threads", "1"], "1"),
            ("Ray, HAProxy", ["--on", "ray", "--replicas", "2"], "1"),
            ("Ray, its own proxy", ["--on", "ray", "--replicas", "2"], "0"),
        ):
            with serving(artifact, *options, RAY_SERVE_ENABLE_HA_PROXY=proxy) as served:
                asyncio.run(ask(served, 4, 1))
                results.add("replicas", [name, asyncio.run(load(served))])


if __name__ == "__main__":
    main()
