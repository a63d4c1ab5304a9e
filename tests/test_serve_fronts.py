"""Several front processes that share a port."""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from artifacts import write_artifact
from served import eventually, request_of
from test_serve_process import process

from laconic.errors import UsageError
from serve.fronts import Fronts, divide, shift_address
from serve.settings.server_settings import Settings


def children_of(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for file in files for child in file.read_text().split())


def ask(url: str) -> int:
    """The status of a request over a connection of its own, or 0 where there is none."""
    try:
        return httpx.post(f"{url}/v2/models/twice/infer", json=request_of([[1, 2, 3]]), timeout=10).status_code
    except httpx.TransportError:
        return 0


def test_a_killed_front_leaves_the_other_serving_and_is_started_again(tmp_path: Path) -> None:
    with process(write_artifact(tmp_path / "twice.laconic"), fronts=2, drain=0) as (started, url):
        first, second = children_of(started.pid)
        assert ask(url) == 200
        os.kill(first, signal.SIGKILL)
        time.sleep(0.1)
        assert [ask(url) for _ in range(10)] == [200] * 10
        assert eventually(lambda: len(set(children_of(started.pid)) - {first, second}) == 1, 20)
        started.terminate()
        assert started.wait(20) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in (first, second))


def test_no_front_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with process(write_artifact(tmp_path / "twice.laconic"), fronts=2, workers=1) as (started, url):
        fronts = children_of(started.pid)
        workers = [pid for front in fronts for pid in children_of(front)]
        assert len(fronts) == len(workers) == 2
        started.kill()
        assert eventually(lambda: ask(url) == 0)
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*fronts, *workers)))


def test_requests_under_way_are_answered_when_all_fronts_get_the_signal_as_well(tmp_path: Path) -> None:
    with (
        process(write_artifact(tmp_path / "twice.laconic"), fronts=2, drain=0.5) as (started, url),
        httpx.Client(base_url=url) as client,
    ):
        assert client.get("/v2/health/ready").status_code == 200
        for pid in (started.pid, *children_of(started.pid)):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        assert client.get("/v2/health/ready").status_code == 503
        assert started.wait(20) == 0


def test_an_artifact_that_no_front_can_open_ends_the_start_with_its_own_error(tmp_path: Path) -> None:
    broken = write_artifact(tmp_path / "broken.laconic", nonsense=1)
    with pytest.raises(AssertionError, match="not a model of the fake engine"), process(broken, fronts=2):
        pass


def test_each_front_has_its_share_of_the_cores_and_addresses_of_its_own() -> None:
    settings = divide(Settings(fronts=2, threads=5, shares={"a": 8, "b": 1}, admin="127.0.0.1:9000"), 1)
    assert (settings.threads, settings.shares, settings.admin) == (2, {"a": 4, "b": 1}, "127.0.0.1:9001")
    addresses = [shift_address(address, 2) for address in ("9000", "[::1]:9000", "unix:/run/a.sock", "unix:/run/a:1")]
    assert addresses == ["9002", "[::1]:9002", "unix:/run/a.sock.2", "unix:/run/a:1.2"]
    with pytest.raises(UsageError, match="--grpc-port"):
        Fronts({}, Settings(fronts=2, grpc_port=0), "127.0.0.1", 0)
