"""The LoRA adapters that a generation worker has loaded, and loads anew when it is started again."""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from laconic.errors import NotReady, RuntimeFailure
from serve.workers.child_process import ERRORS

log = logging.getLogger("laconic.serve")


class WorkerAdapters:
    """Adapters by the numbers that requests name them by, each given once. Used from any thread.

    send: sends a command to the worker that runs now; does nothing where none does.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._loaded: dict[int, Path] = {}
        self._waiting: dict[int, tuple[Path, Future[None]]] = {}

    def load(self, folder: Path, check_running: Callable[[], None]) -> int:
        """Load an adapter, and wait for it; return its number. check_running: raises NotReady while no worker runs.
        Raises the worker's error, and NotReady where it dies meanwhile."""
        answer: Future[None] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = folder, answer
        try:
            check_running()  # only now: of a worker that dies from here on, `lose` ends the waiting
            self._send({"load": [number, str(folder)]})
            answer.result()
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        return number

    def unload(self, number: int) -> None:
        """Let no request begin with an adapter any more."""
        with self._lock:
            self._loaded.pop(number, None)
        self._send({"unload": number})

    def settle(self, report: Mapping[str, Any]) -> None:
        """Take the worker's answer to a command that loads: `adapter`, its number, and where it failed `error` and
        `kind`."""
        error = ERRORS.get(report["kind"], RuntimeFailure)(report["error"]) if "error" in report else None
        with self._lock:
            folder, answer = self._waiting.get(report["adapter"], (None, None))
            if folder is not None and error is None:
                self._loaded[report["adapter"]] = folder
        if answer is not None and error is not None:
            answer.set_exception(error)
        elif answer is not None:
            answer.set_result(None)
        elif error is not None:
            log.error("an adapter is not loaded again: %s", error)

    def restore(self) -> None:
        """Have a worker that was started again load what the one before had."""
        with self._lock:
            loaded = dict(self._loaded)
        for number, folder in loaded.items():
            self._send({"load": [number, str(folder)]})

    def lose(self) -> None:
        """End the waiting for a worker that is gone."""
        with self._lock:
            waiting = [answer for _, answer in self._waiting.values() if not answer.done()]
        for answer in waiting:
            answer.set_exception(NotReady("the engine stopped while it loaded this adapter. Try again"))
