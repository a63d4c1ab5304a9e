"""What a request costs the server: an echo of 384 numbers, in requests per CPU-second, beside other servers.

    python benchmarks/serving.py [--peer NAME=PYTHON ...]

Every server gets the same load from the same client in turn, in rounds; only the processor time of the server's
processes counts. "bare uvicorn" reads the body and sends it back: what HTTP alone costs. Laconic runs the model, an
identity in ONNX Runtime, asked in the binary and in the JSON form of V2; the others hand the numbers back, without a
model. Peers (`litserve`, `bentoml`, `mlserver`, `ray`, `triton` with nvidia-pytriton) are installed beside, in
environments of their own, of which PYTHON is the interpreter.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper
from results import Results, make_parser
from serving_peers import BARE, PEERS, V2, Peer, make_v2_request

from laconic.commands.http_session import write_request
from laconic.loadtest.http_client import ConnectionFailed, HttpClient
from laconic.loadtest.traffic import OK, Load

SIZE = 384
START = 120
"""Seconds in which a server has to start."""
LACONIC = "Laconic, V2 binary"
LACONIC_JSON = "Laconic, V2 JSON"


@dataclass
class Target:
    """A running server, and the request that it gets."""

    name: str
    process: psutil.Process
    port: int
    request: bytes

    def cpu_seconds(self) -> float:
        """User and system, of the server and its children."""
        processes = [self.process, *self.process.children(recursive=True)]
        return float(sum(times.user + times.system for times in (each.cpu_times() for each in processes)))

    async def measure(self, clients: int, seconds: float) -> float:
        """Requests per CPU-second."""
        load = Load(urlsplit(f"http://127.0.0.1:{self.port}"), [self.request])
        before = self.cpu_seconds()
        samples = await load.run_closed(clients, seconds)
        failed = {sample.outcome for sample in samples} - {OK}
        if failed:
            raise RuntimeError(f"{self.name} answered {', '.join(failed)}")
        return len(samples) / (self.cpu_seconds() - before)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--peer", action="append", default=[], help="NAME=PYTHON of an environment that has it")
    parser.add_argument("--clients", default="16,64")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    interpreters = {"bare uvicorn": sys.executable, "FastAPI": sys.executable}
    interpreters |= dict(peer.partition("=")[::2] for peer in arguments.peer)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        laconic = start_laconic(folder, stack)
        in_json = make_request(V2, json.dumps(make_v2_request([1.0] * SIZE)).encode())
        targets = [laconic, replace(laconic, name=LACONIC_JSON, request=in_json)]
        targets += [start_peer(PEERS[name], python, folder, stack) for name, python in interpreters.items()]
        for target in targets:
            asyncio.run(wait_until_ready(target))
            asyncio.run(target.measure(4, arguments.seconds / 2))
        results = Results(publish=arguments.publish)
        for clients in map(int, arguments.clients.split(",")):
            found: dict[str, list[float]] = {target.name: [] for target in targets}
            for _ in range(arguments.rounds):
                for target in targets:
                    found[target.name].append(asyncio.run(target.measure(clients, arguments.seconds)))
            print(f"\n{clients} clients, {arguments.rounds} rounds:\n")
            results.table(
                f"{clients} clients",
                ["server, wire format", "requests per CPU-second", "of bare uvicorn (range)"],
                make_rows(found),
            )


def make_rows(found: dict[str, list[float]], bases: Sequence[str] = (BARE,)) -> list[list[str]]:
    """Make a row per server, the fastest first: the median, and the ratios to each of the bases."""
    return [
        [name, f"{statistics.median(rates):.0f}", *(describe_ratio(rates, found[base]) for base in bases)]
        for name, rates in sorted(found.items(), key=lambda item: -statistics.median(item[1]))
    ]


def describe_ratio(rates: Sequence[float], base: Sequence[float]) -> str:
    """Describe the ratio of rates of the same rounds: median and range."""
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def start_laconic(folder: Path, stack: ExitStack, *options: str) -> Target:
    """Export an identity and serve it. options: further ones of `laconic serve`."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", SIZE]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "echo", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "echo.onnx"
    )
    artifact = folder / "echo.laconic"
    command = [sys.executable, "-m", "laconic"]
    subprocess.run([*command, "export", folder / "echo.onnx", "-o", artifact], check=True, stdout=subprocess.DEVNULL)
    port = 8850
    serve = [*command, "serve", str(artifact), "--runtime", "onnxruntime", "--port", str(port), *options]
    return start(LACONIC, serve, port, make_binary_request(V2), stack)


def start_peer(peer: Peer, python: str, folder: Path, stack: ExitStack) -> Target:
    """Write a peer's program and start it."""
    path = folder / f"{peer.module}.py"
    path.write_text(peer.program, encoding="utf-8")
    for name, content in peer.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    command = [python, *(word.format(folder=folder, path=path, port=peer.port) for word in peer.command)]
    return start(peer.name, command, peer.port, make_peer_request(peer), stack)


def make_peer_request(peer: Peer) -> bytes:
    """The request with SIZE numbers that a peer takes."""
    if peer.binary:
        return make_binary_request(peer.path)
    if peer.body is None:
        return make_request(peer.path, np.ones(SIZE, np.float32).tobytes())
    return make_request(peer.path, json.dumps(peer.body([1.0] * SIZE)).encode())


def start(name: str, command: list[str], port: int, request: bytes, stack: ExitStack) -> Target:
    """Start a server, which ends with the stack."""
    # A peer's environment has its own packages.
    environment = os.environ if name == LACONIC else {**os.environ, "PYTHONPATH": ""}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    stack.callback(stop, psutil.Process(process.pid), process)
    return Target(name, psutil.Process(process.pid), port, request)


def stop(server: psutil.Process, process: "subprocess.Popen[bytes]") -> None:
    """End a server and its children."""
    children = server.children(recursive=True)
    process.terminate()
    process.wait(40)
    for child in children:
        if child.is_running():
            child.kill()


def make_binary_request(path: str) -> bytes:
    """A V2 request whose tensor of SIZE numbers is binary."""
    header, body = write_request({"x": np.ones((1, SIZE), np.float32)})
    return make_request(path, body, f"inference-header-content-length: {header}\r\n")


def make_request(path: str, body: bytes, given: str = "content-type: application/json\r\n") -> bytes:
    """A whole HTTP request."""
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{given}content-length: {len(body)}\r\n\r\n".encode() + body


async def wait_until_ready(target: Target) -> None:
    """Return when the server answers 200. Raises RuntimeError if it does not in time."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        try:
            client = await HttpClient.connect(urlsplit(f"http://127.0.0.1:{target.port}"))
            status = (await client.send(target.request)).status
            client.close()
            if status == 200:
                return
        except ConnectionFailed:
            status = 0
        await asyncio.sleep(0.3)
    raise RuntimeError(f"{target.name} does not answer: status {status}")


if __name__ == "__main__":
    main()
