"""Engine workers in processes of their own: what they carry, how they die, how they are started again."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from artifacts import FAILED, write_artifact
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from served import Running, change_artifact, eventually, request_of, running
from test_serve_process import process

from laconic.artifacts.manifest import MANIFEST
from laconic.errors import CorruptArtifact, LaconicError, RuntimeFailure, UnprovenArtifact
from serve.workers.devices import assign_gpus, list_gpus
from serve.workers.frames import receive_frame, send_frame
from serve.workers.supervisor import Supervisor

ROW = [[1, 2, 3]]


def ask(client: httpx.Client, rows: object = ROW) -> httpx.Response:
    return client.post("/v2/models/twice/infer", json=request_of(rows))


def worker_of(server: Running) -> int:
    (pid,) = server.app.repository.get("twice").backend.processes
    return pid


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def post_together(client: httpx.Client, count: int) -> tuple[list[int], Callable[[], None]]:
    """Send requests at the same time. Returns their statuses as they come, and what waits for all."""
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(client).status_code)) for _ in range(count)]
    for thread in threads:
        thread.start()
    return answers, lambda: [thread.join() for thread in threads] and None


dtypes = st.sampled_from(["bool", "int8", "uint16", "int64", "float16", "float32", "float64"]).map(np.dtype)
arrays = dtypes.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, min_side=0, max_side=5)))


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=8), arrays, max_size=4), st.text(max_size=20))
def test_a_frame_carries_any_tensors_bit_by_bit(tensors: dict[str, np.ndarray], error: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, tensors, error)
        received, told = receive_frame(theirs)
    assert told == error
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert received[name].tobytes() == tensor.tobytes()


def test_a_large_frame_arrives_whole_and_one_that_ends_early_is_an_error() -> None:
    tensor = np.random.default_rng(0).standard_normal((3, 1 << 19)).astype(np.float32).T
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send_frame, args=(ours, {"x": tensor}))
        sender.start()
        received, _ = receive_frame(theirs)
        sender.join()
    np.testing.assert_array_equal(received["x"], tensor)
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(b"\x10\x00\x00\x00{")
        ours.close()
        with pytest.raises(ConnectionResetError):
            receive_frame(theirs)


def test_a_worker_answers_and_a_failure_of_the_engine_stays_with_its_request(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "twice.laconic", poison=7)
    with running(path, workers=1, threads=2) as server, server.client() as client:
        assert ask(client).json()["outputs"][0]["data"] == [2, 4, 6]
        assert ask(client, [[7, 0, 0]]).status_code == 500
        assert ask(client).status_code == 200
        assert len(server.app.repository.get("twice").batcher.executors) == 2


@pytest.mark.parametrize(
    ("environment", "files", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, GPU-8932f937"}, ["nvidia0"], ["2", "GPU-8932f937"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], []),
        ({}, ["nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"], ["2", "10"]),
        ({}, [], []),
    ],
)
def test_gpus_are_those_that_the_server_may_use(
    tmp_path: Path, environment: dict[str, str], files: list[str], expected: list[str]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert list_gpus(environment, tmp_path) == expected


def test_workers_are_divided_among_gpus_and_one_is_started_for_each_by_default() -> None:
    shown = [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert assign_gpus(None, ["0", "1"]) == shown
    assert assign_gpus(3, ["0", "1"]) == [*shown, shown[0]]
    assert assign_gpus(None, []) == [{}]
    assert assign_gpus(0, ["0"]) == []


def test_a_model_for_a_gpu_has_a_worker_that_sees_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    path = change_artifact(write_artifact(tmp_path / "twice.laconic"), target="cuda")
    with running(path, runtime="fake") as server, server.client() as client:
        assert ask(client).status_code == 200
        pids = server.app.repository.get("twice").backend.processes
        shown = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        assert sorted(next(each for each in one if each.startswith(b"CUDA_VISIBLE")) for one in shown) == [
            b"CUDA_VISIBLE_DEVICES=0",
            b"CUDA_VISIBLE_DEVICES=1",
        ]


def test_a_killed_worker_fails_what_it_ran_at_once_and_is_back_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart, run_once = threading.Event(), Supervisor._run_once

    def held(supervisor: Supervisor) -> LaconicError:
        """Nothing is started before all requests are answered."""
        assert restart.wait(20)
        return run_once(supervisor)

    path = write_artifact(tmp_path / "twice.laconic", seconds=0.4)
    with running(path, workers=1, threads=1) as server, server.client() as client:
        monkeypatch.setattr(Supervisor, "_run_once", held)
        answers, join = post_together(client, 6)
        assert eventually(lambda: server.app.repository.get("twice").batcher.pending > 0)
        os.kill(worker_of(server), signal.SIGKILL)
        join()
        assert len(answers) == 6
        assert set(answers) <= {200, 503}
        assert 503 in answers
        refused = ask(client)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        restart.set()
        assert client.get("/v2/health/live").status_code == 200
        assert eventually(lambda: client.get("/v2/health/ready").status_code == 200, 20)
        assert ask(client).status_code == 200


def test_a_stopped_worker_is_noticed_killed_and_replaced(tmp_path: Path) -> None:
    with (
        running(write_artifact(tmp_path / "twice.laconic"), workers=1, watchdog=1.5) as server,
        server.client() as client,
    ):
        first = worker_of(server)
        os.kill(first, signal.SIGSTOP)
        assert eventually(lambda: client.get("/v2/health/ready").status_code == 503, 6)
        assert "no sign of life" in client.get("/v2/models/twice/ready").json()["error"]
        assert eventually(lambda: ask(client).status_code == 200, 20)
        assert not is_running(first)


def test_an_engine_that_never_returns_is_noticed(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "twice.laconic", stuck=7)
    with running(path, workers=1, watchdog=1.0) as server, server.client() as client:
        answer = ask(client, [[7, 0, 0]])
        assert answer.status_code == 503
        assert eventually(lambda: ask(client).status_code == 200, 20)


def test_a_worker_that_keeps_dying_is_given_up_and_the_reason_is_told(tmp_path: Path) -> None:
    with (
        running(write_artifact(tmp_path / "twice.laconic"), workers=1, max_crashes=2) as server,
        server.client() as client,
    ):
        for _ in range(2):
            assert eventually(lambda: client.get("/v2/health/ready").status_code == 200, 20)
            os.kill(worker_of(server), signal.SIGSEGV)
            assert eventually(lambda: client.get("/v2/health/ready").status_code == 503)
        assert eventually(lambda: "not started again" in client.get("/v2/health/ready").json()["error"])
        assert "SIGSEGV" in client.get("/v2/models/twice/ready").json()["error"]
        assert ask(client).status_code == 503
        assert not server.app.repository.get("twice").backend.processes


def test_of_two_workers_the_other_one_goes_on(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "twice.laconic")
    with running(path, workers=2, threads=2) as server, server.client() as client:
        os.kill(server.app.repository.get("twice").backend.processes[0], signal.SIGKILL)
        statuses = [ask(client).status_code for _ in range(50)]
        assert statuses.count(200) >= 48
        assert client.get("/v2/health/ready").status_code == 200


def test_an_artifact_that_does_not_open_in_a_worker_is_refused_with_its_own_error(tmp_path: Path) -> None:
    unproven = write_artifact(tmp_path / "unproven.laconic", verdict=FAILED)
    with pytest.raises(UnprovenArtifact, match="failed its validation"), running(unproven, workers=1):
        pass
    broken = write_artifact(tmp_path / "broken.laconic", nonsense=1)
    with pytest.raises(RuntimeFailure, match="not a model of the fake engine"), running(broken, workers=1):
        pass
    damaged = write_artifact(tmp_path / "damaged.laconic")
    (damaged / "model.onnx").write_text("{ }")
    with pytest.raises(CorruptArtifact), running(damaged, workers=1):
        pass


def test_an_artifact_replaced_since_it_was_checked_is_not_opened_on_a_restart(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "twice.laconic")
    with running(path, workers=1, max_crashes=1) as server, server.client() as client:
        (path / MANIFEST).write_bytes((write_artifact(tmp_path / "other", factor=3) / MANIFEST).read_bytes())
        os.kill(worker_of(server), signal.SIGKILL)
        assert eventually(lambda: client.get("/v2/health/ready").status_code == 503)


def test_a_killed_server_leaves_no_worker_behind(tmp_path: Path) -> None:
    with process(write_artifact(tmp_path / "twice.laconic"), workers=2) as (started, _):
        children = Path(f"/proc/{started.pid}/task").glob("*/children")
        workers = [int(pid) for file in children for pid in file.read_text().split()]
        assert len(workers) == 2
        started.kill()
        started.wait(10)
        assert eventually(lambda: not any(map(is_running, workers)))


def test_sigterm_to_the_whole_group_ends_requests_under_way(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "twice.laconic", seconds=0.3)
    with process(path, workers=1, threads=1, drain=0) as (started, url), httpx.Client(base_url=url) as client:
        answers, join = post_together(client, 3)
        time.sleep(0.2)
        children = Path(f"/proc/{started.pid}/task").glob("*/children")
        for pid in [int(pid) for file in children for pid in file.read_text().split()]:
            os.kill(pid, signal.SIGTERM)
        started.terminate()
        join()
        assert answers == [200] * 3
        assert started.wait(10) == 0
