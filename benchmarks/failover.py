"""What clients see while one of three servers behind nginx freezes, dies, restarts or is cut off the network.

    python benchmarks/failover.py ARTIFACT REQUEST [FAULT]...

Needs nginx, iptables for `cut-off`, and root for both. REQUEST: the JSON body for the predict endpoint. Prints
requests, errors, and latencies before and after the fault.
"""

import json
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
from results import Results, make_parser

from serve.asgi.listener import bind

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
FAULTS = ("frozen", "killed", "restarted", "cut-off")
HEAD = ("fault", "requests", "errors", "p99 before, ms", "p99 after, ms", "longest, ms")
CLIENTS, SERVERS, READ_TIMEOUT = 12, 3, 3
SECONDS = 5.0, 20.0
"""Of load before the fault and after it."""
PAUSE = 0.02
"""Seconds between two requests of a client."""


class Answer(NamedTuple):
    """A request: when it began, how long it took, its status (0: no answer)."""

    start: float
    seconds: float
    status: int


def write_config(folder: Path, front: int, ports: list[int]) -> Path:
    """Write deploy/nginx/laconic.conf for these servers, for any version of nginx from 1.22 on."""
    config = (DEPLOY / "nginx/laconic.conf").read_text(encoding="utf-8")
    lines = "".join(f"server 127.0.0.1:{port} max_fails=1 fail_timeout=2s;\n" for port in ports)
    config = re.sub(r"(    server laconic-\d:8000.*\n)+", lines, config)
    config = re.sub(r"server laconic-\d:8001", "server 127.0.0.1:1", config)
    config = re.sub(r"listen 8443 ssl;\n    http2 on;.*", f"listen 127.0.0.1:{front} ssl;", config)
    config = config.replace("/run/secrets", str(folder / "secrets"))
    config = config.replace("read_timeout 10s", f"read_timeout {READ_TIMEOUT}s")
    head = f"daemon off; pid {folder}/pid; error_log stderr;\nevents {{}}\nhttp {{ access_log off;\n"
    path = folder / "nginx.conf"
    path.write_text(f"{head}{config}}}\n", encoding="utf-8")
    return path


def start(artifact: str, port: int) -> "subprocess.Popen[bytes]":
    """Start a server of the artifact, under the name `model`."""
    command = [sys.executable, "-m", "laconic", "serve", f"model={artifact}", "--port", str(port), "--threads", "1"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def end(process: "subprocess.Popen[bytes]", sign: signal.Signals = signal.SIGKILL) -> None:
    """End a process, and wait for it."""
    process.send_signal(sign)
    process.wait()


def break_one(fault: str, server: "subprocess.Popen[bytes]", port: int, artifact: str, stack: ExitStack) -> None:
    """Let a fault come over a server."""
    if fault == "frozen":
        server.send_signal(signal.SIGSTOP)
    elif fault == "killed":
        server.kill()
    elif fault == "restarted":
        server.terminate()
        server.wait()
        stack.callback(end, start(artifact, port))
    else:
        rule = ["INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP"]
        subprocess.run(["iptables", "-I", *rule], check=True)
        stack.callback(subprocess.run, ["iptables", "-D", *rule], check=True)


def measure(
    fault: str, artifact: str, body: object, seconds: tuple[float, float] = SECONDS
) -> tuple[list[Answer], list[Answer]]:
    """Put load on three servers, and break one. Returns the answers that came before and after.

    seconds: of load before the fault and after it.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        script = folder / "prepare.sh"
        script.write_bytes((DEPLOY / "prepare.sh").read_bytes())
        subprocess.run(["sh", str(script)], check=True, stdout=subprocess.DEVNULL)
        with ExitStack() as reserved:
            listeners = [reserved.enter_context(closing(bind("127.0.0.1", 0))) for _ in range(SERVERS + 1)]
            front, *ports = [listener.getsockname()[1] for listener in listeners]
        servers = [start(artifact, port) for port in ports]
        for server in servers:
            stack.callback(end, server)
        nginx = subprocess.Popen(["nginx", "-c", write_config(folder, front, ports), "-p", folder], stderr=-3)
        stack.callback(end, nginx, signal.SIGTERM)
        verify = ssl.create_default_context(cafile=folder / "secrets/tls.crt")
        http = stack.enter_context(httpx.Client(base_url=f"https://localhost:{front}", verify=verify, timeout=30))
        wait_for(ports)
        stopped, answers = threading.Event(), list[Answer]()

        def ask() -> None:
            while not stopped.wait(PAUSE):
                begin, status = time.monotonic(), 0
                with suppress(httpx.TransportError):
                    status = http.post("/v1/models/model/predict", json=body).status_code
                answers.append(Answer(begin, time.monotonic() - begin, status))

        clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(seconds[0])
        moment = time.monotonic()
        break_one(fault, servers[0], ports[0], artifact, stack)
        time.sleep(seconds[1])
        stopped.set()
        for client in clients:
            client.join()
        early = [each for each in answers if each.start + each.seconds < moment]
        return early, [each for each in answers if each.start + each.seconds >= moment]


def wait_for(ports: list[int]) -> None:
    """Wait until every server is ready."""
    end = time.monotonic() + 60
    for port in ports:
        while time.monotonic() < end:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200:
                    break
            time.sleep(0.1)


def describe(before: list[Answer], after: list[Answer]) -> list[str]:
    """Return the cells of a fault: requests, errors and latencies."""
    errors = sum(each.status != 200 for each in (*before, *after))
    times = [sorted(each.seconds for each in answers) for answers in (before, after)]
    seconds = [*(each[int(0.99 * len(each))] for each in times), times[1][-1]]
    return [str(len(before) + len(after)), str(errors), *(f"{1e3 * each:.0f}" for each in seconds)]


def main() -> None:
    """Bring about each fault, and print."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact")
    parser.add_argument("request", type=json.loads)
    parser.add_argument("faults", nargs="*", default=FAULTS)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    results.begin("faults", HEAD)
    for fault in arguments.faults:
        results.add("faults", [fault, *describe(*measure(fault, arguments.artifact, arguments.request))])


if __name__ == "__main__":
    main()
