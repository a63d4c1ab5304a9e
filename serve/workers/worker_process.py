"""One life of an engine worker, from the side of the server."""

import contextlib
import math
import socket
import subprocess
import time
from collections.abc import Mapping

import orjson

from laconic.arrays import Array, Arrays
from laconic.errors import NotReady, RuntimeFailure, describe_error
from serve.workers.child_process import (
    TICK,
    SilenceClock,
    kill,
    kill_silent,
    receive_report,
    spawn,
    wait_for_exit,
)
from serve.workers.engine_job import EngineJob
from serve.workers.frames import receive_frame, send_frame


class WorkerLost(NotReady):
    """The process that was to run a batch is gone, or was never there. retry_after: seconds."""

    def __init__(self, message: str, retry_after: float = 0) -> None:
        super().__init__(message)
        self.retry_after = max(1, math.ceil(retry_after))


class WorkerConnection:
    """A connection to one session of a worker. One caller at a time.

    started: when the batch began that runs now. lost: whether the worker is known to be gone, or what comes next on the
    connection would belong to a batch that was interrupted.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self.started = math.inf
        self.lost = False

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Return the outputs. Raises RuntimeFailure with what the engine said, and OSError where the worker is gone.

        A batch of which not all was sent and received closes the connection, and thereby ends the worker.
        """
        self.started = time.monotonic()
        try:
            send_frame(self._stream, inputs)
            outputs, error = receive_frame(self._stream)
        except BaseException:
            self.lost = True
            self.close()
            raise
        finally:
            self.started = math.inf
        if error:
            raise RuntimeFailure(error)
        return outputs

    def close(self) -> None:
        """Close the connection; a run that waits for its outputs gets OSError."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


class WorkerProcess:
    """A process that runs the sessions of a job. environment: what it has besides that of the server."""

    def __init__(self, job: EngineJob, environment: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:

            def connect() -> tuple[socket.socket, socket.socket]:
                kept, inherited = socket.socketpair()
                return ours.enter_context(kept), theirs.enter_context(inherited)

            try:
                self._control, control = connect()
                pairs = [connect() for _ in range(job.sessions)]
                inherited = [control, *(other for _, other in pairs)]
                self.process: subprocess.Popen[bytes] = spawn(__package__, inherited, environment)
            except OSError as error:
                raise RuntimeFailure(f"the worker cannot be started: {describe_error(error)}") from error
            numbers = [each.fileno() for each in inherited[1:]]
            ours.pop_all()
        self.connections = [WorkerConnection(kept) for kept, _ in pairs]
        with contextlib.suppress(OSError):  # `wait_until_open` sees that a worker is gone already
            self._control.sendall(orjson.dumps({"job": job, "connections": numbers}) + b"\n")

    def wait_until_open(self) -> dict[str, str]:
        """Wait until the worker is open; return what was opened: `runtime` and `note`. Raises the error of the worker,
        RuntimeFailure where it died."""
        return receive_report(self._control, self.process)

    def watch(self, silence: float, batch_seconds: float) -> str:
        """Wait until the process has died. Returns how it ended.

        It is killed where it gives no heartbeat for longer than `silence` seconds, runs one batch for longer than
        `batch_seconds`, or stays although a connection was lost. Time in which this process was stopped too, as a
        paused container is, does not count.
        """
        self._control.settimeout(TICK)
        clock = SilenceClock()
        while True:
            try:
                alive = self._control.recv(1 << 12)
            except TimeoutError:
                alive = None
            except OSError:
                alive = b""
            if alive == b"" or any(connection.lost for connection in self.connections):
                return wait_for_exit(self.process)
            now = time.monotonic()
            if clock.look(now, heard=bool(alive)) > silence:
                return kill_silent(self.process, silence)
            if not clock.was_stopped and any(now - each.started > batch_seconds for each in self.connections):
                kill(self.process)
                return f"ran a batch for more than {batch_seconds:g} s and was killed"

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        for connection in self.connections:
            connection.close()
        kill(self.process)
        self._control.close()
