"""Several front processes that share a port: each is a whole server, and one that dies is started again."""

import contextlib
import logging
import math
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType

import orjson

from laconic.errors import UsageError
from laconic.hardware import cores
from serve.asgi.listener import UNIX
from serve.settings.server_settings import Settings
from serve.workers.child_process import kill, raise_failure, spawn, wait_for_exit
from serve.workers.supervisor import Report, Supervisor

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What is passed on to the fronts, which ignore signals themselves: a group's signal would reach them twice."""
SPARE = 5.0
"""Seconds beyond the grace after which a front that does not stop is killed."""

log = logging.getLogger("laconic.serve")


class Fronts:
    """Starts front processes, starts them again, and stops them. artifacts: folders by the names of
    models. host and port: what all of them bind."""

    def __init__(self, artifacts: Mapping[str, Path], settings: Settings, host: str, port: int) -> None:
        if settings.grpc_port == 0:
            raise UsageError("several fronts share one gRPC port: give --grpc-port a number, not 0")
        self.jobs = [
            {
                "artifacts": {name: str(path.absolute()) for name, path in artifacts.items()},
                "host": host,
                "port": port,
                "settings": divide(settings, number).model_dump(mode="json"),
            }
            for number in range(settings.fronts)
        ]
        self.patience = settings.drain + settings.grace + SPARE
        self._deadline = math.inf
        self._stopping = threading.Event()
        self._processes: dict[socket.socket, subprocess.Popen[bytes]] = {}
        self._lock = threading.RLock()  # a signal may come while the main thread holds it

    def run(self, announce: Callable[[str], None]) -> None:
        """Serve until a signal stops it. announce: called with the line for a ready server.

        Raises the error of a front that cannot be started.
        """
        supervisors = [
            Supervisor("a front process", partial(self._run_front, job), self._stopping, on_crash=log_crash)
            for job in self.jobs
        ]
        before = {each: signal.signal(each, self._pass_on) for each in SIGNALS}
        try:
            for supervisor in supervisors:
                supervisor.start()
            reports = [supervisor.ready.result() for supervisor in supervisors]
            if reports[0] is not None and not self._stopping.is_set():
                announce(reports[0]["ready"])
            while alive := [supervisor for supervisor in supervisors if supervisor.is_alive()]:
                alive[0].join(0.2)
                if time.monotonic() > self._deadline:
                    self._kill()
        except BaseException:
            self._stopping.set()
            self._kill()
            raise
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _pass_on(self, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGHUP:
            self._stopping.set()
            self._deadline = min(self._deadline, time.monotonic() + self.patience)
        with self._lock:
            for control in self._processes:
                with contextlib.suppress(OSError):
                    control.sendall(b"%d\n" % sig)

    def _kill(self) -> None:
        """Kill the fronts, whether or not they still listen."""
        with self._lock:
            for process in self._processes.values():
                process.kill()

    def _run_front(self, job: dict[str, object], set_ready: Callable[[Report], None]) -> str:
        """Run one front to its end. Returns how it ended. Raises what keeps it from starting."""
        control, theirs = socket.socketpair()
        with control:
            with theirs:
                process = spawn("serve.server", [theirs], {})
            with self._lock:
                self._processes[control] = process
            try:
                self._follow(control, job, set_ready)
            except OSError:  # it is gone
                pass
            except BaseException:
                kill(process)
                raise
            finally:
                with self._lock:
                    del self._processes[control]
        return wait_for_exit(process)

    def _follow(self, control: socket.socket, job: dict[str, object], set_ready: Callable[[Report], None]) -> None:
        """Give a front its job, and listen to it until it is gone. Raises the error that it reports."""
        control.sendall(orjson.dumps(job) + b"\n")
        if self._stopping.is_set():
            control.sendall(b"%d\n" % signal.SIGTERM)
        with control.makefile("rb") as lines:
            for line in lines:
                report = orjson.loads(line)
                raise_failure(report)
                set_ready(report)


def log_crash(reason: str, delay: float | None) -> None:
    """Log why a front crashed. delay: seconds until it is started again, as any front is."""
    log.error("%s; it is started again in %g s", reason, delay or 0)


def divide(settings: Settings, number: int) -> Settings:
    """Make the settings of one front: its share of the cores, and an admin address of its own."""
    shared = {"threads": max(1, (settings.threads or cores()) // settings.fronts)}
    shares = {name: max(1, count // settings.fronts) for name, count in (settings.shares or {}).items()}
    admin = None if settings.admin is None else shift_address(settings.admin, number)
    return settings.model_copy(update={**shared, "shares": shares or None, "admin": admin})


def shift_address(address: str, number: int) -> str:
    """Make the address of one of several: the port plus its number, or the path with it."""
    head, _, port = address.rpartition(":")
    if not address.startswith(UNIX) and port.isdecimal():
        return f"{head}:{int(port) + number}" if head else str(int(port) + number)
    return f"{address}.{number}" if number else address
