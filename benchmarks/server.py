"""What HTTP costs: rows per CPU-second of the whole server, against the bare engine at the mean batch size that
the server reached in the round.

    python benchmarks/server.py ARTIFACT

The server and the bare loop are processes of their own, with the same number of executors; this process is the load:
so many connections, each sending its next request when it has its answer. Rounds of both take turns, so that what else
the machine does falls on both alike. Of the client's processor time nothing is counted.
"""

import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
from results import Results, make_parser

from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact
from serve.model_repository.model import read_cap
from serve.protocol.infer_request import DATATYPES
from serve.settings.server_settings import Settings

SERVE = """
import json, sys
from pathlib import Path
from serve.server import serve
serve([Path(sys.argv[1])], port=0, **json.loads(sys.argv[2]))
"""
DISTINCT = 64
"""Different requests that are sent in turn."""
TABLE = "HTTP and the bare engine"
HEAD = (
    "clients", "requests per second", "latency, ms: p50, p99", "rows per CPU-second", "bare engine",
    "ratio (range)", "mean batch", "resident memory",
)  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--clients", default="64,1", help="numbers of them, in turn")
    parser.add_argument("--rows", type=int, default=1, help="rows of each request")
    parser.add_argument("--length", type=int, default=32, help="of free axes: tokens")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--executors", type=int, default=None)
    parser.add_argument("--runtime", default=None)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    settings = Settings(executors=arguments.executors, runtime=arguments.runtime, queue_seconds=60, unproven=True)
    artifact = Artifact.load(arguments.artifact)
    requests = requests_of(artifact, arguments.rows, arguments.length)
    batch = read_cap(artifact).rows_at({"length": arguments.length})
    executors, threads = settings.parallelism()
    print(f"{executors} executors of {threads} threads, batches of up to {batch} rows\n")
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    bare = multiprocessing.get_context("spawn").Process(
        target=run_bare, args=(theirs, arguments.artifact, settings, arguments.length), daemon=True
    )
    bare.start()
    results.begin(TABLE, HEAD)
    with Served(arguments.artifact, settings) as server:
        for clients in map(int, arguments.clients.split(",")):
            load = Load(server.port, requests, clients)
            asyncio.run(load.run(1.0))
            rounds = [measure_round(server, load, ours, arguments.seconds) for _ in range(arguments.rounds)]
            results.add(TABLE, make_row(clients, rounds, server.memory()))
    ours.send(None)
    bare.join()


@dataclass(frozen=True)
class Round:
    """What one round gave. rate: requests per second. latencies: in milliseconds. rows, bare: per CPU-second, over HTTP
    and of the engine alone. batch: mean number of rows."""

    rate: float
    latencies: list[float]
    rows: float
    bare: float
    batch: float


def measure_round(server: "Served", load: "Load", bare: Connection, seconds: float) -> Round:
    """Send requests for so many seconds; then let the engine alone run batches of the mean size that they came in."""
    before = server.batches()
    cpu, started = server.cpu_seconds(), time.monotonic()
    latencies = asyncio.run(load.run(seconds))
    wall, cpu = time.monotonic() - started, server.cpu_seconds() - cpu
    rows, batches = (after - old for after, old in zip(server.batches(), before, strict=True))
    bare.send((seconds, round(rows / batches)))
    return Round(len(latencies) / wall, [1e3 * value for value in latencies], rows / cpu, bare.recv(), rows / batches)


def make_row(clients: int, rounds: list[Round], memory: int) -> list[str]:
    """Make the row of a number of clients: medians of rounds, with the range of what is compared."""
    p50, p99 = np.percentile([value for each in rounds for value in each.latencies], [50, 99])
    ratios = [each.rows / each.bare for each in rounds]
    return [
        str(clients),
        f"{statistics.median(each.rate for each in rounds):.0f}",
        f"{p50:.1f}, {p99:.1f}",
        f"{statistics.median(each.rows for each in rounds):.0f}",
        f"{statistics.median(each.bare for each in rounds):.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{statistics.fmean(each.batch for each in rounds):.1f}",
        f"{memory / 1e6:.0f} MB",
    ]


def run_bare(pipe: Connection, path: Path, settings: Settings, length: int) -> None:
    """The engine alone: on request, run batches of one size for so many seconds and tell rows per CPU-second."""
    artifact = Artifact.load(path)
    executors, threads = settings.parallelism()
    sessions = artifact.open_many(executors, settings.runtime, threads=threads)
    while (asked := pipe.recv()) is not None:
        seconds, batch = asked
        inputs = [artifact.task().typical(batch, length, seed) for seed in range(8)]
        rows = [0] * executors
        end = time.monotonic() + seconds

        def loop(
            number: int, inputs: list[Arrays] = inputs, rows: list[int] = rows, end: float = end, batch: int = batch
        ) -> None:
            for arrays in cycle(inputs):
                sessions[number].run(arrays)
                rows[number] += batch
                if time.monotonic() > end:
                    return

        threads_of = [threading.Thread(target=loop, args=(number,)) for number in range(executors)]
        started = time.process_time()
        for thread in threads_of:
            thread.start()
        for thread in threads_of:
            thread.join()
        pipe.send(sum(rows) / (time.process_time() - started))


class Served:
    """The server in a process of its own."""

    def __init__(self, path: Path, settings: Settings) -> None:
        command = [sys.executable, "-c", SERVE, str(path), settings.model_dump_json()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.rpartition(":")[2])
        self.usage = psutil.Process(self.process.pid)

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def cpu_seconds(self) -> float:
        """User and system of the server and its workers, since they started."""
        times = [each.cpu_times() for each in (self.usage, *self.usage.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def memory(self) -> int:
        """Resident bytes of the server and its workers."""
        return int(sum(each.memory_info().rss for each in (self.usage, *self.usage.children(recursive=True))))

    def batches(self) -> tuple[int, int]:
        """Rows and batches that the engine ran."""
        return asyncio.run(self._statistics())

    async def _statistics(self) -> tuple[int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /v2/models/stats HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        stats = json.loads(body)["model_stats"][0]
        return stats["inference_count"], stats["execution_count"]


def requests_of(artifact: Artifact, rows: int, length: int) -> list[bytes]:
    """HTTP requests in V2 binary, asking for binary answers."""
    requests = []
    for seed in range(DISTINCT):
        inputs: Arrays = artifact.task().typical(rows, length, seed)
        described = [
            {
                "name": name,
                "datatype": DATATYPES[array.dtype],
                "shape": array.shape,
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in inputs.items()
        ]
        header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
        body = header + b"".join(array.tobytes() for array in inputs.values())
        head = (
            f"POST /v2/models/{artifact.name}/infer HTTP/1.1\r\nhost: localhost\r\n"
            f"inference-header-content-length: {len(header)}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        requests.append(head.encode() + body)
    return requests


class Load:
    """Clients in a closed loop."""

    def __init__(self, port: int, requests: list[bytes], clients: int) -> None:
        self.port = port
        self.requests = requests
        self.clients = clients

    async def run(self, seconds: float) -> list[float]:
        """The seconds that each request took. Raises RuntimeError for an answer other than 200."""
        end = time.monotonic() + seconds
        latencies: list[float] = []
        turns = cycle(self.requests)
        await asyncio.gather(*(self._client(turns, end, latencies) for _ in range(self.clients)))
        return latencies

    async def _client(self, requests: Iterator[bytes], end: float, latencies: list[float]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while (started := time.monotonic()) < end:
            writer.write(next(requests))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            body = await reader.readexactly(int(head.split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0]))
            if not head.startswith(b"http/1.1 200"):
                raise RuntimeError(f"{head.decode()}{body[:400].decode(errors='replace')}")
            latencies.append(time.monotonic() - started)
        writer.close()


if __name__ == "__main__":
    main()
