"""The process around the application: a port, signals, and one line when it is ready."""

import asyncio
import math
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from laconic.errors import UsageError
from serve.app import App, create_app
from serve.model import Model
from serve.server_settings import Settings
from serve.wire import to_json

BACKLOG = 2048
MAX_PORT = 65_535
LONGEST_EXAMPLE = 400
"""Characters. An image as numbers is no example that anyone would paste."""


class Server(uvicorn.Server):
    """Uvicorn that says it is not ready before it closes its port, and exits with 0 when it was asked to stop."""

    def __init__(self, app: App, settings: Settings, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=math.ceil(settings.grace),
        )
        super().__init__(config)
        self.app = app
        self.drain = settings.drain
        self.on_ready = on_ready

    async def main_loop(self) -> None:
        """Serve until a signal comes, then say not-ready for a while, still answering, so that balancers notice."""
        self.on_ready()
        await super().main_loop()
        self.app.repository.ready = False
        # Connections that clients keep are ended with their next answer, rather than cut under their next request.
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        end = time.monotonic() + self.drain
        while time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.05)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn leaves the application running when it is forced to stop; here it is closed in any case."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM drains, Ctrl-C does not wait, and a second signal gives up what is under way.

        The signal is not raised again afterwards, as uvicorn would: the exit code is 0.
        """
        if self.should_exit:
            self.force_exit = True
        if sig != signal.SIGTERM:
            self.drain = 0
        self.should_exit = True


def serve(
    artifacts: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    announce: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serve until a signal stops it.

    port: 0 takes a free one. announce: is given the line that says it is ready. options: those of Settings.
    Raises UsageError for a port that cannot be had, and what opening the artifacts raises.
    """
    settings = Settings(**options)
    if threading.current_thread() is threading.main_thread():
        # As a container's first process it would otherwise not hear the signal while it loads.
        signal.signal(signal.SIGTERM, leave)
    with bind(host, port) as listener:
        app = create_app(artifacts, settings)
        listen(listener, host, port)
        host, port = listener.getsockname()[:2]

        def on_ready() -> None:
            (announce or write_line)(format_welcome(app, host, port))

        Server(app, settings, on_ready).run(sockets=[listener])


def leave(sig: int, frame: FrameType | None) -> None:
    """End the process before it serves, or when it no longer does."""
    raise SystemExit(0)


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address, before any model is loaded: a port in use is found at once."""
    if not 0 <= port <= MAX_PORT:
        raise UsageError(f"there is no port {port}. Choose one from 1 to {MAX_PORT}, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"this machine has no address {host!r} ({error.strerror}). Try --host 0.0.0.0") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise make_address_error(host, port, error) from None
    return listener


def listen(listener: socket.socket, host: str, port: int) -> None:
    """Open the bound port; another process may have been faster."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise make_address_error(host, port, error) from None


def make_address_error(host: str, port: int, error: OSError) -> UsageError:
    """The error for an address that cannot be had."""
    return UsageError(
        f"cannot listen on {host} port {port}: {error.strerror}. Choose another --port, or stop what uses it"
    )


def format_welcome(app: App, host: str, port: int) -> str:
    """The address, the models, and a request that can be pasted into a shell."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared with, not bound to
        host = "127.0.0.1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    models = list(app.repository)
    names = ", ".join(model.name for model in models)
    return f"Serving {names} at {url}\n  Try: {format_example(models[0], url)}"


def format_example(model: Model, url: str) -> str:
    """A request as a shell command."""
    address = f"{url}/v1/models/{model.name}/predict"
    if model.task.upload is not None:
        return f"curl {address} -F {model.task.field}=@{model.task.upload.example}"
    body = to_json(model.task.example_request()).decode()
    if len(body) > LONGEST_EXAMPLE:
        return f"curl {url}/v2/models/{model.name}"
    return f"curl {address} -d {shlex.quote(body)}"


def write_line(text: str) -> None:
    """To standard output, at once: whoever started the server waits for it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
