"""The server as a process: what it imports, how it starts, how it stops."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from artifacts import write_artifact
from served import request_of

from laconic.errors import UsageError
from serve.server import bind

HEAVY = ("torch", "onnx", "transformers", "onnxscript", "onnx_ir", "pyarrow", "matplotlib")
SERVE = f"""
import json, sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
from pathlib import Path
from serve.server import serve
serve([Path(sys.argv[1])], port=0, **json.loads(sys.argv[2]))
heavy = [name for name in {HEAVY!r} if name in sys.modules]
print("stopped", heavy, flush=True)
"""


@contextmanager
def process(artifact: Path, **options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server in a process of its own, and its URL."""
    command = [sys.executable, "-W", "error", "-c", SERVE, str(artifact), json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout
        assert started.stderr
        line = started.stdout.readline()
        try:
            assert line.startswith("Serving "), line + started.stderr.read()
            yield started, line.split()[-1]
        finally:
            started.kill()


def test_a_request_is_served_with_torch_and_onnx_blocked(tmp_path: Path) -> None:
    with process(write_artifact(tmp_path / "twice.laconic"), drain=0) as (started, url):
        assert httpx.post(f"{url}/v2/models/twice/infer", json=request_of([[1, 2, 3]])).status_code == 200
        assert httpx.post(f"{url}/v1/models/twice/predict", json={"inputs": [[1, 2, 3]]}).status_code == 200
        started.terminate()
        output, errors = started.communicate(timeout=10)
        assert output.splitlines()[-1] == "stopped []"
        assert started.returncode == 0, errors
        assert errors == ""


def test_the_line_that_says_ready_holds_a_request_that_works(tmp_path: Path) -> None:
    with process(write_artifact(tmp_path / "twice.laconic"), drain=0) as (started, _):
        assert started.stdout
        command = started.stdout.readline().partition("Try: ")[2]
        answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
        assert set(json.loads(answer)) == {"model", "answers"}


def test_sigterm_says_not_ready_first_answers_what_is_under_way_and_exits_with_0(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "slow.laconic", seconds=1.0)
    statuses: list[int] = []

    def post(client: httpx.Client) -> None:
        statuses.append(client.post("/v2/models/slow/infer", json=request_of([[1, 2, 3]])).status_code)

    with process(path, drain=2.0, threads=1) as (started, url), httpx.Client(base_url=url, timeout=20) as client:
        assert client.get("/v2/health/ready").status_code == 200
        requests = [threading.Thread(target=post, args=(client,)) for _ in range(8)]
        for request in requests:
            request.start()
        time.sleep(0.2)
        started.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        answer = client.get("/v2/health/ready")
        assert answer.status_code == 503
        assert "stopping" in answer.json()["error"]
        assert answer.headers["connection"] == "close"
        assert client.get("/v2/health/live").status_code == 200
        for request in requests:
            request.join()
        assert statuses == [200] * 8
        assert started.wait(10) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)


def test_requests_that_do_not_end_in_time_get_503(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "slow.laconic", seconds=4.0)
    answers: list[httpx.Response] = []

    def post(client: httpx.Client) -> None:
        answers.append(client.post("/v2/models/slow/infer", json=request_of([[1, 2, 3]] * 4)))

    with (
        process(path, drain=0, grace=1, threads=1, queue_seconds=60) as (started, url),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        requests = [threading.Thread(target=post, args=(client,)) for _ in range(6)]
        for request in requests:
            request.start()
        time.sleep(1)
        started.send_signal(signal.SIGTERM)
        for request in requests:
            request.join()
        assert [answer.status_code for answer in answers] == [503] * 6
        assert started.wait(20) == 0


def test_ctrl_c_does_not_wait_for_balancers(tmp_path: Path) -> None:
    with process(write_artifact(tmp_path / "twice.laconic"), drain=60) as (started, _):
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 0


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    with process(write_artifact(tmp_path / "twice.laconic"), drain=60) as (started, url):
        started.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/v2/health/ready").is_success:  # else both are one, on a busy machine
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        assert started.wait(30) == 0


def test_a_port_in_use_is_refused_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}: .*Choose another --port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no.such.host.invalid", 0), ("127.0.0.1", 70_000)])
def test_an_address_that_cannot_be_had_is_refused_in_one_sentence(host: str, port: int) -> None:
    with pytest.raises(UsageError):
        bind(host, port)


def test_ipv6_is_served() -> None:
    if not Path("/proc/net/if_inet6").is_file() or not os.access("/proc/net/if_inet6", os.R_OK):
        pytest.skip("no IPv6 here")
    with bind("::1", 0) as listener:
        assert listener.family == socket.AF_INET6


def test_sigterm_while_a_model_loads_ends_the_server_with_0(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "slow.laconic", seconds=30.0)
    command = [sys.executable, "-c", SERVE.replace("\nserve([", "\nprint('up', flush=True)\nserve(["), str(path), "{}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout
        assert started.stdout.readline() == "up\n"
        time.sleep(0.5)
        started.terminate()
        assert started.wait(5) == 0
