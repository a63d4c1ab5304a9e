"""The server's log: errors and, if asked for, requests, as text or as JSON, each line with the request's id."""

import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from queue import Full, Queue
from typing import Any

from serve.asgi.wire import Scope
from serve.observation.tracing import TRACE
from serve.settings.server_settings import Settings

WAITING = 10_000
"""Lines that wait to be written. The next are dropped: nobody may be reading, and requests do not wait for that."""
STANDARD_ERROR = 2
PATIENCE = 2.0
"""Seconds for the lines that wait when the server stops."""
REQUEST_ID = b"x-request-id"
SANE = re.compile(rb"[\w.:+/=@-]{1,128}", re.ASCII)

CURRENT: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that the current task works on."""

access = logging.getLogger("laconic.serve.access")


def choose_id(identifier: bytes) -> bytes:
    """Choose the id of a request: the given one if it is sane, else a new one."""
    return identifier if SANE.fullmatch(identifier) else secrets.token_hex(16).encode()


def write_access(scope: Scope, status: int, seconds: float, caller: str | None) -> None:
    """Write the line of a request that is over. caller: the name of its key."""
    fields = {
        "method": scope["method"],
        "path": scope["raw_path"].decode("ascii", "backslashreplace"),  # as it came, without line breaks
        "status": status,
        "duration_ms": round(1000 * seconds, 3),
        "client": scope["client"][0] if scope.get("client") else None,
        "key": caller,
    }
    access.info("%(method)s %(path)s %(status)s in %(duration_ms)s ms", fields, extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """A line of text."""

    def format(self, record: logging.LogRecord) -> str:
        identifier = getattr(record, "request", None)
        request = f" [{identifier}]" if identifier else ""
        return f"{stamp(record)} {record.levelname} {record.name}{request}: {super().format(record)}"


class JsonFormatter(logging.Formatter):
    """A line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "time": stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request", None),
            "trace_id": getattr(record, "trace", None),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in content.items() if value is not None}, default=str)


class DroppingHandler(QueueHandler):
    """Leaves lines to another thread, since whoever reads them may be slow. Drops those that are too many."""

    def emit(self, record: logging.LogRecord) -> None:
        trace = TRACE.get()
        record.__dict__ |= {"request": CURRENT.get(), "trace": trace.id if trace is not None else None}
        super().emit(record)

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            return


def stamp(record: logging.LogRecord) -> str:
    """Format the time of a record by the clock, in UTC."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


@contextmanager
def open_log(settings: Settings) -> Iterator[None]:
    """Write the log of this process to standard error as the settings say, until the body ends."""
    lines: Queue[logging.LogRecord | None] = Queue(WAITING)
    handler = DroppingHandler(lines)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    root, ours = logging.getLogger(), logging.getLogger("laconic")
    level = ours.level
    writer = threading.Thread(target=write_lines, args=(lines,), name="log", daemon=True)
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    writer.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(level)
        with suppress(Full):
            lines.put_nowait(None)
        writer.join(PATIENCE)


def write_lines(lines: "Queue[logging.LogRecord | None]") -> None:
    """Write lines to standard error until None comes, whatever is in them and whether or not somebody reads them.

    To its descriptor: who waits for a reader within `sys.stderr` holds a lock that the end of the process wants. The
    name of a file or a path need not be UTF-8.
    """
    while (line := lines.get()) is not None:
        with suppress(OSError):
            os.write(STANDARD_ERROR, f"{line.msg}\n".encode(errors="backslashreplace"))
