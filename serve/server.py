"""The server process: it listens on a port, handles signals, and prints one line when it is ready."""

import asyncio
import math
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn

from laconic.errors import UsageError
from serve.app import App, create_app
from serve.connection import Connection, Phase, enforce_deadlines
from serve.grpc_server import GrpcServer
from serve.model import Model
from serve.origin import LOOPBACK, is_loopback
from serve.server_settings import MAX_PORT, Settings
from serve.settings_file import load_settings
from serve.wire import to_json

BACKLOG = 2048
TICKS = 5
"""Tenths of a second between two looks at the deadlines of connections."""
LONGEST_EXAMPLE = 400
"""Characters. A longer request, as an image in numbers, is not shown as an example."""


class Server(uvicorn.Server):
    """Uvicorn that reports not ready before it closes its port, and exits with 0 when a signal stops it."""

    def __init__(self, app: App, settings: Settings, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=math.ceil(settings.grace),
            timeout_keep_alive=math.ceil(settings.keep_alive),
            http=cast(type[asyncio.Protocol], partial(Connection, settings=settings)),
        )
        super().__init__(config)
        self.app = app
        self.settings = settings
        self.drain = settings.drain
        self.on_ready = on_ready
        self.grpc: GrpcServer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, on the gRPC port too if there is one."""
        await super().startup(sockets)
        if self.settings.grpc_port is not None and sockets:
            self.grpc = GrpcServer(self.app)
            await self.grpc.start(sockets[0].getsockname()[0], self.settings.grpc_port)

    async def on_tick(self, counter: int) -> bool:
        """What is done ten times a second while the server runs."""
        if counter % TICKS == 0:
            enforce_deadlines(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def main_loop(self) -> None:
        """Serve until a signal comes, then report not ready while still answering, so that load balancers drain it."""
        self.on_ready()
        await super().main_loop()
        self.app.repository.ready = False
        # Connections that clients keep are ended with their next answer, rather than cut under their next request.
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        end = time.monotonic() + self.drain
        while time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.05)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down. Requests that have not arrived in full are cut first: they would keep the others' time to end.

        When forced, Uvicorn would leave the application running, which is closed here in any case.
        """
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and connection.phase in (Phase.HEADERS, Phase.BODY):
                connection.cut(503, "the server is stopping. Try again, or try another replica")
        if self.grpc is not None:
            # The application's shutdown waits for it, so that models are closed after the last answer.
            self.app.stopping = asyncio.create_task(self.grpc.stop(0 if self.force_exit else self.settings.grace))
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: SIGTERM drains, Ctrl-C stops without waiting, a second signal drops running requests.

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
    settings: Path | None = None,
    **options: Any,
) -> None:
    """Serve until a signal stops it.

    port: 0 takes a free one. announce: called with the line for a ready server. settings: a file. options: those of
    Settings, which win over the environment and the file. Raises UsageError for settings that are none and for a port
    that cannot be bound, and what opening the artifacts raises.
    """
    limits = load_settings(options, os.environ, settings)
    if is_loopback(host) and not limits.allowed_hosts:
        limits = limits.model_copy(update={"allowed_hosts": (*LOOPBACK, host)})
    if limits.grpc_port:
        bind(host, limits.grpc_port, option="--grpc-port").close()  # gRPC binds it only when models are loaded
    if threading.current_thread() is threading.main_thread():
        # As a container's first process it would otherwise not hear the signal while it loads.
        signal.signal(signal.SIGTERM, leave)
    with bind(host, port) as listener:
        app = create_app(artifacts, limits)
        if limits.api_key_file is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, lambda *_: app.guard.reload())
        listen(listener, host, port)
        host, port = listener.getsockname()[:2]

        def on_ready() -> None:
            (announce or write_line)(format_welcome(app, host, port, server.grpc))

        server = Server(app, limits, on_ready)
        server.run(sockets=[listener])


def leave(sig: int, frame: FrameType | None) -> None:
    """Exit on a signal before the server runs, or after it."""
    raise SystemExit(0)


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """Bind a socket before any model is loaded, so that a port in use is reported at once. Raises UsageError."""
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
        raise make_address_error(host, port, error, option) from None
    return listener


def listen(listener: socket.socket, host: str, port: int) -> None:
    """Listen on the bound socket. Raises UsageError where another process was faster."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise make_address_error(host, port, error) from None


def make_address_error(host: str, port: int, error: OSError, option: str = "--port") -> UsageError:
    """The error for an address that cannot be bound."""
    return UsageError(
        f"cannot listen on {host} port {port}: {error.strerror}. Choose another {option}, or stop what uses it"
    )


def format_welcome(app: App, host: str, port: int, grpc: GrpcServer | None = None) -> str:
    """The line for a ready server: its address, the models, and a request that can be pasted into a shell."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared with, not bound to
        host = "127.0.0.1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    models = list(app.repository)
    names = ", ".join(model.name for model in models)
    notes = "".join(f"  {model.name} runs in {model.note}\n" for model in models if model.note)
    also = f", gRPC at {host}:{grpc.port}" if grpc else ""
    example = format_example(models[0], url, key=app.guard.keys is not None)
    return f"Serving {names} at {url}{also}\n{notes}  Try: {example}"


def format_example(model: Model, url: str, *, key: bool) -> str:
    """A request to the predict endpoint as a shell command. key: whether requests need one."""
    address = f"{url}/v1/models/{model.name}/predict"
    if key:
        address += ' -H "X-API-Key: $KEY"'
    if model.task.upload is not None:
        return f"curl {address} -F {model.task.field}=@{model.task.upload.example}"
    body = to_json(model.task.example_request()).decode()
    if len(body) > LONGEST_EXAMPLE:
        return f"curl {url}/v2/models/{model.name}"
    return f"curl {address} -d {shlex.quote(body)}"


def write_line(text: str) -> None:
    """Write a line to standard output, flushed: the process that started the server waits for it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
