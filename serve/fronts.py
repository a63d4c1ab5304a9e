"""Several front processes that share a port: each is a whole server, and one that dies is started again."""

import contextlib
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

import orjson

from laconic.errors import RuntimeFailure, UsageError
from laconic.hardware import cores
from serve.asgi.listener import UNIX
from serve.settings.server_settings import Settings
from serve.workers.backoff import Backoff
from serve.workers.child_process import spawn, wait_for_exit
from serve.workers.worker_process import ERRORS

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What is passed on to the fronts, which ignore signals themselves: a group's signal would reach them twice."""
SPARE = 5.0
"""Seconds beyond the grace after which a front that does not stop is killed."""

log = logging.getLogger("laconic.serve")


class Fronts:
    """Starts front processes, starts them again, and stops them. host and port: what all of them bind."""

    def __init__(self, artifacts: Sequence[Path], settings: Settings, host: str, port: int) -> None:
        if settings.grpc_port == 0:
            raise UsageError("several fronts share one gRPC port: give --grpc-port a number, not 0")
        self.jobs = [
            {
                "artifacts": [str(path.absolute()) for path in artifacts],
                "host": host,
                "port": port,
                "settings": divide(settings, number).model_dump(mode="json"),
            }
            for number in range(settings.fronts)
        ]
        self.patience = settings.drain + settings.grace + SPARE
        self._deadline = math.inf
        self._stopping = threading.Event()
        self._controls: set[socket.socket] = set()
        self._lock = threading.Lock()

    def run(self, announce: Callable[[str], None]) -> None:
        """Serve until a signal stops it. announce: called with the line for a ready server.

        Raises the error of a front that cannot be started.
        """
        opened: list[Future[str]] = [Future() for _ in self.jobs]
        supervisors = [
            threading.Thread(target=self._supervise, args=(job, future), daemon=True)
            for job, future in zip(self.jobs, opened, strict=True)
        ]
        before = {each: signal.signal(each, self._pass_on) for each in SIGNALS}
        try:
            for supervisor in supervisors:
                supervisor.start()
            lines = [future.result() for future in opened]
            if not self._stopping.is_set():
                announce(lines[0])
            while any(supervisor.is_alive() for supervisor in supervisors):
                supervisors[0].join(0.2)
                if time.monotonic() > self._deadline:
                    self._send(signal.SIGKILL)
        except BaseException:
            self._stopping.set()
            self._send(signal.SIGKILL)
            raise
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _pass_on(self, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGHUP:
            self._stopping.set()
            self._deadline = min(self._deadline, time.monotonic() + self.patience)
        self._send(sig)

    def _send(self, sig: int) -> None:
        with self._lock:
            for control in self._controls:
                with contextlib.suppress(OSError):
                    control.sendall(b"%d\n" % sig)

    def _supervise(self, job: dict[str, object], opened: "Future[str]") -> None:
        """Keep a front running. This thread lives as long as its front, which the system kills with it."""
        backoff = Backoff()
        while not self._stopping.is_set():
            started = time.monotonic()
            why = self._run_front(job, opened)
            if self._stopping.is_set():
                break
            if not opened.done():
                opened.set_exception(RuntimeFailure(f"a front process {why} before it was ready"))
            if opened.exception():
                return
            delay = backoff.count(time.monotonic() - started)
            log.error("a front process %s; it is started again in %g s", why, delay)
            self._stopping.wait(delay)
        if not opened.done():
            opened.set_result("")

    def _run_front(self, job: dict[str, object], opened: "Future[str]") -> str:
        """Run one front to its end, and tell how it ended."""
        control, theirs = socket.socketpair()
        with control:
            with theirs:
                process = spawn("serve.server", [theirs], {})
            with self._lock:
                self._controls.add(control)
            try:
                self._follow(control, job, opened)
            except OSError:  # it is gone
                pass
            finally:
                with self._lock:
                    self._controls.discard(control)
        return wait_for_exit(process)

    def _follow(self, control: socket.socket, job: dict[str, object], opened: "Future[str]") -> None:
        """Give a front its job, and listen to it until it is gone."""
        control.sendall(orjson.dumps(job) + b"\n")
        if self._stopping.is_set():
            control.sendall(b"%d\n" % signal.SIGTERM)
        with control.makefile("rb") as lines:
            for line in lines:
                told = orjson.loads(line)
                if opened.done():
                    continue
                if "error" in told:
                    opened.set_exception(ERRORS.get(told["kind"], RuntimeFailure)(told["error"]))
                else:
                    opened.set_result(told["ready"])


def divide(settings: Settings, number: int) -> Settings:
    """The settings of one front: its share of the cores, and an admin address of its own."""
    shared = {"threads": max(1, (settings.threads or cores()) // settings.fronts)}
    shares = {name: max(1, count // settings.fronts) for name, count in (settings.shares or {}).items()}
    admin = None if settings.admin is None else shift_address(settings.admin, number)
    return settings.model_copy(update={**shared, "shares": shares or None, "admin": admin})


def shift_address(address: str, number: int) -> str:
    """The address of one of several: the port plus its number, or the path with it."""
    head, _, port = address.rpartition(":")
    if not address.startswith(UNIX) and port.isdecimal():
        return f"{head}:{int(port) + number}" if head else str(int(port) + number)
    return f"{address}.{number}" if number else address
