"""What a front process does beside serving: it obeys the supervisor of several that share a port.

The first line that it receives is its job; it answers with its line for a ready server, or the error. Further lines are
the signals that the supervisor received.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from serve.settings.server_settings import Settings
from serve.workers.child_process import bind_to_parent, report_failure

Run = Callable[..., None]
"""Serves to the end: as `serve.server.run`."""


class Front:
    """A server in a thread, and the connection to the supervisor. run: serves."""

    def __init__(self, run: Run, control: socket.socket) -> None:
        self.run = run
        self.control = control
        self._signal: Callable[[int], None] | None = None

    def follow(self) -> None:
        """Serve until the supervisor says so, or is gone."""
        with self.control.makefile("rb") as lines:
            job = orjson.loads(lines.readline())
            threading.Thread(target=self._work, args=(job,)).start()
            for line in lines:
                number = int(line)
                if self._signal is None:
                    break
                self._signal(number)
        os._exit(0)

    def _work(self, job: dict[str, Any]) -> None:
        """Serve, and end the process with the server: without it the process would only keep its port."""
        code = 1
        try:
            self.run(
                {name: Path(path) for name, path in job["artifacts"].items()},
                Settings.model_validate(job["settings"]),
                host=job["host"],
                port=job["port"],
                announce=lambda line: self._report({"ready": line}),
                attach=self._attach,
            )
            code = 0
        except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor reports it
            with suppress(OSError):
                self._report(report_failure(error))
        finally:
            os._exit(code)

    def _attach(self, handle: Callable[[int], None]) -> None:
        self._signal = handle

    def _report(self, content: dict[str, str]) -> None:
        self.control.sendall(orjson.dumps(content) + b"\n")


def main(run: Run) -> None:
    """Run the program of a front process; its argument is the number of the supervisor's socket."""
    bind_to_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Front(run, socket.socket(fileno=int(sys.argv[1]))).follow()
