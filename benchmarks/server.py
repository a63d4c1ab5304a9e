"""What HTTP costs: rows per CPU-second of the whole server, against the bare engine at the mean batch size that
the server reached in the round.

    python benchmarks/server.py ARTIFACT

The server and the bare loop are processes of their own, with the same number of executors; this process is the load:
64 connections, each sending its next request when it has its answer. Rounds of both take turns, so that what else the
machine does falls on both alike. Of the client's processor time nothing is counted.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1, help="rows of each request")
    parser.add_argument("--length", type=int, default=32, help="of free axes: tokens")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--executors", type=int, default=None)
    parser.add_argument("--runtime", default=None)
    arguments = parser.parse_args()
    settings = Settings(executors=arguments.executors, runtime=arguments.runtime, queue_seconds=60, unproven=True)
    artifact = Artifact.load(arguments.artifact)
    executors, threads = settings.parallelism()
    batch = read_cap(artifact).rows_at({"length": arguments.length})
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    bare = multiprocessing.get_context("spawn").Process(
        target=run_bare, args=(theirs, arguments.artifact, settings, arguments.length), daemon=True
    )
    bare.start()
    with Served(arguments.artifact, settings) as server:
        load = Load(server.port, requests_of(artifact, arguments.rows, arguments.length), arguments.clients)
        asyncio.run(load.run(1.0))
        print(f"{artifact.name}: {executors} executors of {threads} threads, batches of up to {batch} rows")
        print("round  HTTP req/s  p50 ms  p99 ms  HTTP rows/CPU-s  bare rows/CPU-s  ratio  mean batch")
        ratios = []
        for number in range(arguments.rounds):
            before = server.batches()
            cpu, started = server.cpu_seconds(), time.monotonic()
            latencies = asyncio.run(load.run(arguments.seconds))
            wall, cpu = time.monotonic() - started, server.cpu_seconds() - cpu
            rows, batches = (after - old for after, old in zip(server.batches(), before, strict=True))
            ours.send((arguments.seconds, round(rows / batches)))
            bare_rate = ours.recv()
            ratios.append(rows / cpu / bare_rate)
            p50, p99 = (1e3 * value for value in np.percentile(latencies, [50, 99]))
            print(
                f"{number:5}  {len(latencies) / wall:10.0f}  {p50:6.1f}  {p99:6.1f}  {rows / cpu:15.0f}  "
                f"{bare_rate:15.0f}  {ratios[-1]:5.3f}  {rows / batches:10.1f}"
            )
        low, median, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"HTTP gives {median:.1%} of the bare engine's rows per CPU-second ({low:.1%} to {high:.1%})")
        print(f"server: {server.memory() / 1e6:.0f} MB resident")
    ours.send(None)
    bare.join()


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
