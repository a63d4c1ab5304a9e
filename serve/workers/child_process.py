"""Child processes that never outlive their parent."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from laconic import errors
from laconic.errors import LaconicError, RuntimeFailure, describe_error

HOME = Path(__file__).resolve().parents[2]
"""Where our packages lie; a child finds them there, however the parent did."""
PR_SET_PDEATHSIG = 1
TICK = 0.25
"""Seconds between two looks at a child that says nothing."""
EXIT_SECONDS = 3.0
"""How long a process that is killed, or exits, may take to be gone."""
ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, LaconicError)
}
"""The errors that a child process reports by name."""


def spawn(package: str, sockets: Sequence[socket.socket], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the program of a package, with these sockets; the first one's number is its argument.

    What the child prints goes to standard error: standard output belongs to the server's own line. environment: added
    to this process's. The child dies with the thread that calls this, which must live as long.
    """
    paths = filter(None, (str(HOME), os.environ.get("PYTHONPATH")))
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-P", "-m", package, str(sockets[0].fileno())],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=[each.fileno() for each in sockets],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
    )


def bind_to_parent() -> None:
    """Have the child, which calls this, be killed when the parent dies, and leave signals of the whole group to the
    parent.

    A terminal sends Ctrl-C to all processes, and systemd SIGTERM; the parent still needs its children to end requests.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process if it still runs, and wait until it is gone.

    One that waits for a device in the kernel stays beyond that: it is not waited for without end.
    """
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_SECONDS)


def kill_silent(process: "subprocess.Popen[bytes]", silence: float) -> str:
    """Kill a process that was silent for longer than `silence` seconds. Returns how it ended."""
    kill(process)
    return f"gave no sign of life for {silence:g} s and was killed"


class SilenceClock:
    """Measures how long a child has been silent. Time in which this process was stopped too, as a paused container is,
    does not count. was_stopped: whether it was, just before the last look."""

    def __init__(self) -> None:
        self._heard = self._looked = time.monotonic()
        self.was_stopped = False

    def look(self, now: float, *, heard: bool) -> float:
        """Return the seconds of silence. heard: whether the child said something since the last look, which is due
        every TICK."""
        self.was_stopped = now - self._looked > 4 * TICK
        self._looked = now
        if heard or self.was_stopped:
            self._heard = now
        return now - self._heard


def receive_report(control: socket.socket, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """Receive the line in which a child says what it has opened. Raises the error that it reports, RuntimeFailure where
    it died."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            chunk = control.recv(1 << 16)
        except OSError:
            chunk = b""
        if not chunk:
            raise RuntimeFailure(f"the process that was to open the model {wait_for_exit(process)}")
        line += chunk
    report: dict[str, Any] = orjson.loads(line)
    raise_failure(report)
    return report


def wait_for_exit(process: "subprocess.Popen[bytes]") -> str:
    """Describe how a process ended that has closed a connection, or is about to."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return describe_exit(process.wait(EXIT_SECONDS))
    kill(process)
    return "closed a connection and was killed"


def describe_exit(code: int) -> str:
    """Describe how a process ended. code: negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
    names = {number.value: number.name for number in signal.Signals}  # most real-time signals have none
    return f"was killed by {names.get(-code, f'signal {-code}')}{hint}"


def report_failure(error: BaseException) -> dict[str, str]:
    """Describe in the child what went wrong, for `raise_failure` in the parent."""
    return {"error": describe_error(error), "kind": type(error).__name__ if isinstance(error, LaconicError) else ""}


def raise_failure(report: Mapping[str, str]) -> None:
    """Raise the error that a child process reports, if it reports one."""
    if "error" in report:
        raise ERRORS.get(report["kind"], RuntimeFailure)(report["error"])
