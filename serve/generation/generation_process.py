"""One life of a generation worker, from the side of the server."""

import contextlib
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import orjson

from laconic.errors import RuntimeFailure, describe_error
from serve.generation.generation_job import GenerationJob
from serve.workers.child_process import (
    TICK,
    SilenceClock,
    kill,
    kill_silent,
    receive_report,
    spawn,
    wait_for_exit,
)

RECEIVED = 1 << 16
"""Bytes of events that are received in one go."""


class GenerationProcess:
    """A process that writes with the model of a job."""

    def __init__(self, job: GenerationJob) -> None:
        self._control, inherited = socket.socketpair()
        self._sending = threading.Lock()  # so that lines of several threads stay whole
        try:
            with inherited:
                self.process = spawn(__package__, [inherited], {})
        except OSError as error:
            self._control.close()
            raise RuntimeFailure(f"the worker cannot be started: {describe_error(error)}") from error
        self.send(job)

    def send(self, command: object) -> None:
        """Send a line. To a worker that is gone, nothing is sent: `follow` sees that it is."""
        with self._sending, contextlib.suppress(OSError):
            self._control.sendall(orjson.dumps(command) + b"\n")

    def wait_until_open(self) -> dict[str, Any]:
        """Wait until the model is open; return `blocks`, `block_tokens`, `source_tokens` and `note`, as those of a
        generator. Raises the error of the worker, RuntimeFailure where it died."""
        return receive_report(self._control, self.process)

    def follow(self, silence: float, deliver: Callable[[list[Any]], None]) -> str:
        """Pass on events until the process has died. Returns how it ended. It is killed where it says nothing for
        longer than `silence` seconds."""
        poll = select.poll()  # not a timeout of the socket, which would hold for what is sent too
        poll.register(self._control, select.POLLIN)
        clock = SilenceClock()
        rest = b""
        while True:
            chunk = None
            if poll.poll(1000 * TICK):
                try:
                    chunk = self._control.recv(RECEIVED)
                except OSError:
                    chunk = b""
            if chunk == b"":
                return wait_for_exit(self.process)
            if clock.look(time.monotonic(), heard=chunk is not None) > silence:
                return kill_silent(self.process, silence)
            *lines, rest = (rest + (chunk or b"")).split(b"\n")
            for line in filter(None, lines):
                deliver(orjson.loads(line))

    def end(self, seconds: float) -> None:
        """Have the process write its prefix cache and end, and wait for that for so long at most."""
        self.send({"end": True})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        kill(self.process)
        self._control.close()
