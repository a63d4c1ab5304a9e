"""A thread that keeps a child process running: a worker or a front."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from laconic.errors import LaconicError, RuntimeFailure, describe_error

LONGEST = 16.0
"""Seconds, at most, before a process that keeps dying is started again."""
STEADY = 60.0
"""Seconds after which a death is no longer counted together with the one before."""

Report = Mapping[str, str]
"""What a process reports when it is ready."""
RunProcess = Callable[[Callable[[Report], None]], str]
"""Runs a process to its end, and returns how it ended, as in "exited with code 1".

Passes the report of the process to its argument. Raises what keeps the process from starting.
"""


class Backoff:
    """Delays that grow with the crashes in a row: none after the first, then 1, 2, 4, ... seconds."""

    def __init__(self) -> None:
        self.crashes = 0

    def count(self, lived: float) -> float:
        """Count a crash. lived: seconds that the process ran. Returns the seconds to wait."""
        self.crashes = 1 if lived > STEADY else self.crashes + 1
        return min(LONGEST, 2.0 ** (self.crashes - 2)) if self.crashes > 1 else 0.0


class Supervisor(threading.Thread):
    """Starts a process, waits for its end, and starts it again, later after each crash in a row.

    The system kills a child process with the thread that started it, so this thread lives as long as its processes.
    Whatever is raised in it counts as a crash: the thread does not end without a reason, and `ready` is resolved.

    what: the process, in messages. stopping: when set, the process is not started again. on_crash: called with the
    reason of a crash, and the seconds until the process is started again, None where it is not. max_crashes: in a row,
    after the last of which the process is not started again; None for no limit.

    ready: the report of the first process; its error where it did not get ready; None where `stopping` was set before.
    """

    def __init__(
        self,
        what: str,
        run_process: RunProcess,
        stopping: threading.Event,
        *,
        on_crash: Callable[[str, float | None], None],
        max_crashes: int | None = None,
    ) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.what = what
        self.ready: Future[Report | None] = Future()
        self._run_process = run_process
        self._stopping = stopping
        self._on_crash = on_crash
        self._max_crashes = max_crashes

    def run(self) -> None:
        """Keep the process running until it is stopped, does not get ready, or has crashed too often."""
        backoff = Backoff()
        try:
            while not self._stopping.is_set():
                started = time.monotonic()
                error = self._run_once()
                if self._stopping.is_set():
                    return
                if not self.ready.done():
                    self.ready.set_exception(error)
                    return
                delay = backoff.count(time.monotonic() - started)
                if self._max_crashes is not None and backoff.crashes >= self._max_crashes:
                    self._on_crash(str(error), None)
                    return
                self._on_crash(str(error), delay)
                self._stopping.wait(delay)
        finally:
            if not self.ready.done():
                self.ready.set_result(None)

    def _run_once(self) -> LaconicError:
        """Run the process to its end. Returns how it ended, or what kept it from starting."""
        try:
            end = self._run_process(self._set_ready)
        except BaseException as error:  # noqa: BLE001 - even SystemExit would end nothing but this thread
            if isinstance(error, LaconicError) and not self.ready.done():
                return error
            return RuntimeFailure(f"{self.what} cannot be started: {describe_error(error)}")
        return RuntimeFailure(f"{self.what} {end}" + ("" if self.ready.done() else " before it was ready"))

    def _set_ready(self, report: Report) -> None:
        if not self.ready.done():
            self.ready.set_result(report)
