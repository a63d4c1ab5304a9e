"""Supervisors of workers and fronts: whatever fails, nobody waits for ever, and the reason is given."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson
import pytest
from artifacts import write_artifact
from served import eventually, running
from test_serve_workers import ROW, ask, worker_of

from laconic.artifacts.manifest import MANIFEST
from laconic.errors import ArtifactError, RuntimeFailure
from laconic.hashing import digest_file
from serve.settings.server_settings import Settings
from serve.workers import child_process, worker_process
from serve.workers.child_process import describe_exit
from serve.workers.engine_job import EngineJob
from serve.workers.supervisor import Report, Supervisor
from serve.workers.worker_pool import WatchdogLimits, WorkerPool
from serve.workers.worker_process import WorkerLost

T = TypeVar("T")
SECONDS = 20
"""The most that anything here may take; what waits for ever fails the test, and does not hold up the others."""


def in_time(function: Callable[[], T]) -> T:
    """Call a function that must not wait for ever."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is waited for
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future.result(SECONDS)


def make_job(path: Path) -> EngineJob:
    digest = digest_file(path / MANIFEST).sha256
    return EngineJob(path=str(path), digest=digest, sessions=1, threads=1, runtime="fake", unproven=False)


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no further file or socket."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = next(number for number in range(before[0]) if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


WATCHDOG_LIMITS = WatchdogLimits(seconds=8, crashes=5, batch_seconds=8)


def test_a_worker_for_which_no_socket_is_left_is_an_error(tmp_path: Path) -> None:
    job = make_job(write_artifact(tmp_path / "twice.laconic"))
    with pytest.raises(RuntimeFailure, match=r"the worker cannot be started: .*Too many open files"), no_more_files():
        in_time(lambda: WorkerPool.open(job, [{}, {}], WATCHDOG_LIMITS))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a process that nobody waited for
def test_a_worker_that_outlives_its_kill_for_a_while_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_artifact(tmp_path / "twice.laconic")
    with running(path, workers=1, watchdog=1.0) as server, server.client() as client:
        first = worker_of(server)
        monkeypatch.setattr(child_process, "EXIT_SECONDS", 0)  # no process is gone at once
        os.kill(first, signal.SIGSTOP)
        assert eventually(lambda: client.get("/v2/health/ready").status_code == 503, SECONDS)
        assert client.get("/v2/models/twice/ready").json()["error"].partition(": ")[2]
        assert eventually(lambda: ask(client).status_code == 200, SECONDS)
        assert worker_of(server) != first


def test_a_worker_that_cannot_be_started_again_says_why_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_artifact(tmp_path / "twice.laconic")
    with running(path, workers=1, max_crashes=50) as server, server.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(worker_process, "spawn", lambda *_: (_ for _ in ()).throw(ValueError("embedded null byte")))
            os.kill(worker_of(server), signal.SIGKILL)
            assert eventually(lambda: "null byte" in client.get("/v2/models/twice/ready").text, SECONDS)
            answer = ask(client)
            assert answer.status_code == 503
            assert "ValueError: embedded null byte" in answer.json()["error"]
        assert eventually(lambda: ask(client).status_code == 200, SECONDS)


def test_a_pool_gives_a_reason_before_it_runs_and_after_it_is_closed(tmp_path: Path) -> None:
    job = make_job(write_artifact(tmp_path / "twice.laconic"))
    with pytest.raises(WorkerLost, match="is being started"):
        WorkerPool(job, WATCHDOG_LIMITS).run({})
    pool = WorkerPool.open(job, [{}], WATCHDOG_LIMITS)
    pool.close()
    assert pool.reason == "the model is closed"
    with pytest.raises(WorkerLost, match="the model is closed"):
        pool.run({})


def test_a_batch_that_is_interrupted_leaves_nothing_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = WorkerPool.open(make_job(write_artifact(tmp_path / "twice.laconic")), [{}], WATCHDOG_LIMITS)
    receive_frame = worker_process.receive_frame

    def run_out_of_memory(connection: socket.socket) -> None:
        connection.recv(3)
        monkeypatch.setattr(worker_process, "receive_frame", receive_frame)
        raise MemoryError

    monkeypatch.setattr(worker_process, "receive_frame", run_out_of_memory)
    try:
        first, second = np.array(ROW, np.float32), np.array([[4, 5, 6]], np.float32)
        with pytest.raises(MemoryError):
            in_time(lambda: pool.run({"x": first}))
        answers: list[np.ndarray] = []

        def is_answered() -> bool:
            try:
                answers.append(pool.run({"x": second})["y"])
            except WorkerLost:  # until another worker is there
                return False
            return True

        assert in_time(lambda: eventually(is_answered, SECONDS))
        np.testing.assert_array_equal(answers[0], 2 * second)
        assert pool.restarts == 1
    finally:
        pool.close()


def supervise(*lives: BaseException | str, max_crashes: int | None = None) -> tuple[Supervisor, list[str]]:
    """Supervise a process that reports that it is ready, and then ends in each of these ways in turn.

    Returns the supervisor, which has ended, and the reasons of the crashes.
    """
    stopping = threading.Event()
    crashes: list[str] = []
    rest = list(lives)

    def run_process(set_ready: Callable[[Report], None]) -> str:
        end = rest.pop(0)
        if not rest:
            stopping.set()
        if isinstance(end, BaseException):
            raise end
        set_ready({"name": end})
        return end

    def note_crash(reason: str, delay: float | None) -> None:
        crashes.append(reason if delay is None else f"{reason}; in {delay:g} s")

    supervisor = Supervisor("the process", run_process, stopping, on_crash=note_crash, max_crashes=max_crashes)
    supervisor.start()
    supervisor.join(SECONDS)
    assert not supervisor.is_alive()
    return supervisor, crashes


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), SystemExit(3), ValueError(), KeyError("pid")])
def test_whatever_keeps_the_first_process_from_starting_is_an_error_with_a_reason(error: BaseException) -> None:
    supervisor, crashes = supervise(error, "never")
    found = supervisor.ready.exception(0)
    assert isinstance(found, RuntimeFailure)
    assert str(found).startswith(f"the process cannot be started: {type(error).__name__}")
    assert crashes == []


def test_an_expected_error_is_passed_on_and_nobody_waits_for_a_process_that_was_stopped() -> None:
    error = ArtifactError("there is no artifact")
    assert supervise(error, "never")[0].ready.exception(0) is error
    assert supervise(OSError("it was stopped"))[0].ready.result(0) is None
    assert describe_exit(-signal.SIGTERM) == "was killed by SIGTERM"
    assert describe_exit(-40) == "was killed by signal 40"


def test_whatever_happens_to_a_later_process_is_a_crash_and_after_the_last_it_is_not_started_again() -> None:
    supervisor, crashes = supervise("exited with code 1", SystemExit(), "was ended")
    assert supervisor.ready.result(0) == {"name": "exited with code 1"}
    assert crashes == [
        "the process exited with code 1; in 0 s",
        "the process cannot be started: SystemExit; in 1 s",
    ]
    _, crashes = supervise("exited with code 1", "never", max_crashes=1)
    assert crashes == ["the process exited with code 1"]


START = """
import os, signal, sys
from pathlib import Path
from laconic.errors import LaconicError
from serve import server
from serve.asgi.listener import bind
from serve.fronts import Fronts
from serve.settings.server_settings import Settings

path, case = Path(sys.argv[1]), sys.argv[2]
if case == "spawn":
    sys.executable = "/no/such/python"
    try:
        server.serve([path], port=0, fronts=2)
    except LaconicError as error:
        print(error)
else:
    def stop(line):
        for file in Path("/proc/self/task").glob("*/children"):
            for child in file.read_text().split():
                os.kill(int(child), signal.SIGSTOP)
        fronts.patience = 0.2
        os.kill(os.getpid(), signal.SIGTERM)

    with bind("127.0.0.1", 0, shared=True) as reserved:
        fronts = Fronts({"twice": path}, Settings(), "127.0.0.1", reserved.getsockname()[1])
        fronts.run(stop)
    print("stopped")
"""


@pytest.mark.parametrize(("case", "expected"), [("spawn", "No such file"), ("stop", "stopped")])
def test_fronts_that_do_not_start_or_do_not_listen_end_the_server(tmp_path: Path, case: str, expected: str) -> None:
    path = write_artifact(tmp_path / "twice.laconic")
    done = subprocess.run(
        [sys.executable, "-c", START, str(path), case], capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert expected in done.stdout, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("error", ["SystemExit()", "RuntimeError()", "GeneratorExit()", "KeyboardInterrupt()"])
def test_a_front_ends_with_its_server_and_says_why(error: str) -> None:
    code = f"from serve import front\ndef run(*a, **k): raise {error}\nfront.main(run)"
    ours, theirs = socket.socketpair()
    with ours, ours.makefile("rb") as lines:
        with theirs:
            process = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        job = {"artifacts": {}, "settings": Settings().model_dump(mode="json"), "host": "", "port": 0}
        ours.sendall(orjson.dumps(job) + b"\n")
        ours.settimeout(SECONDS)
        try:
            assert orjson.loads(lines.readline())["error"] == error.removesuffix("()")
            assert process.wait(SECONDS) == 1
        finally:
            process.kill()
            process.wait()
