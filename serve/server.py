"""The server process: it listens on a port, handles signals, and prints one line when it is ready."""

import asyncio
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn

from serve import front
from serve.asgi.connection import Connection, Phase, enforce_deadlines
from serve.asgi.listener import BACKLOG, bind, close_admin, format_address, listen, open_admin
from serve.fronts import Fronts
from serve.http.app import App, create_app
from serve.model_repository.artifact_sources import locate_artifacts
from serve.observation.logs import open_log
from serve.security.origin import is_loopback
from serve.security.tls import Certificate, load_certificate
from serve.settings.server_settings import Settings
from serve.settings.settings_file import LOCAL, load_settings, refuse_settings_of_others
from serve.welcome import Addresses, format_welcome

if TYPE_CHECKING:
    from serve.grpc.grpc_server import GrpcServer

TICKS = 5
"""Tenths of a second between two looks at the deadlines of connections."""
A = TypeVar("A", bound=App)


class Server(uvicorn.Server):
    """Uvicorn that reports not ready before it closes its port, and exits with 0 when a signal stops it.

    certificate: for TLS. admin: where the routes of operators are served, in place of the listeners that it runs with.
    """

    def __init__(
        self,
        app: App,
        settings: Settings,
        on_ready: Callable[[], None],
        *,
        certificate: Certificate | None = None,
        admin: socket.socket | None = None,
    ) -> None:
        self.grace = max(0.0, settings.grace - settings.drain)
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=math.ceil(self.grace),
            timeout_keep_alive=math.ceil(settings.keep_alive),
            http=Connection,
        )
        super().__init__(config)
        self.app = app
        app.metrics.connections = self.server_state.connections
        self.settings = settings
        self.drain = settings.drain
        self.on_ready = on_ready
        self.certificate = certificate
        self.admin = admin
        self.grpc: GrpcServer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, on the gRPC port too if there is one."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            self.servers.append(await self._open(listener, partial(self._make_connection, admin=False)))
        if self.admin is not None:
            self.servers.append(await self._open(self.admin, partial(self._make_connection, admin=True)))
        if self.settings.grpc_port is not None and sockets:
            from serve.grpc.grpc_server import GrpcServer  # takes 12 MB

            self.grpc = GrpcServer(
                self.app.repository,
                self.settings,
                self.app.budget,
                access=self.app.access,
                observer=self.app.observer,
                folders=self.app.folders,
                certificate=self.certificate,
            )
            await self.grpc.start(sockets[0].getsockname()[0], self.settings.grpc_port)

    async def _open(
        self, listener: socket.socket, make_connection: Callable[[], asyncio.Protocol]
    ) -> asyncio.base_events.Server:
        """Serve a listener, with TLS unless only this machine reaches it."""
        loop = asyncio.get_running_loop()
        if self.certificate is None or listener.family is socket.AF_UNIX:
            return await loop.create_server(make_connection, sock=listener, backlog=BACKLOG)
        return await loop.create_server(
            make_connection,
            sock=listener,
            backlog=BACKLOG,
            ssl=self.certificate.context,
            ssl_handshake_timeout=self.settings.header_timeout,
        )

    def _make_connection(self, *, admin: bool) -> Connection:
        return Connection(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            settings=self.settings,
            admin=admin,
        )

    async def on_tick(self, counter: int) -> bool:
        """Do what is done ten times a second while the server runs."""
        if counter % TICKS == 0:
            enforce_deadlines(self.server_state.connections, asyncio.get_running_loop().time())
            if self.certificate is not None:
                self.certificate.refresh()
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
            self.app.stopping = asyncio.create_task(self.grpc.stop(0 if self.force_exit else self.grace))
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
    artifacts: Sequence[Path | str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    announce: Callable[[str], None] | None = None,
    settings: Path | None = None,
    **options: Any,
) -> None:
    """Serve until a signal stops it.

    artifacts: as of `locate_artifacts`. port: 0 takes a free one. announce: called with the line for a ready server.
    settings: a file. options: those of Settings, which win over the environment and the file. Raises UsageError for
    settings that are none and for a port that cannot be bound, and what finding and opening the artifacts raises.
    """
    limits = open_settings(options, settings, host, LOCAL)
    paths = locate_artifacts(artifacts, limits)
    if limits.fronts == 1:
        run(paths, limits, host=host, port=port, announce=announce or write_line)
        return
    with bind(host, port, shared=True) as reserved:  # the fronts listen on it, this process does not
        Fronts(paths, limits, host, reserved.getsockname()[1]).run(announce or write_line)


def open_settings(options: Mapping[str, Any], file: Path | None, host: str, place: str) -> Settings:
    """Load the settings of a server that this process is to be, and handle signals until it is one.

    options, file: as of `load_settings`. place: as of `refuse_settings_of_others`. Raises UsageError.
    """
    limits = load_settings(options, os.environ, file)
    refuse_settings_of_others(limits, place)
    if is_loopback(host) and not limits.allowed_hosts:
        limits = limits.model_copy(update={"allowed_hosts": (host,)})
    if limits.grpc_port:
        bind(host, limits.grpc_port, option="--grpc-port").close()  # gRPC binds it only when models are loaded
    if threading.current_thread() is threading.main_thread():
        # As a container's first process it would otherwise not hear the signal while it loads.
        signal.signal(signal.SIGTERM, leave)
    return limits


def run(
    artifacts: Mapping[str, Path],
    settings: Settings,
    *,
    host: str,
    port: int,
    announce: Callable[[str], None],
    attach: Callable[[Callable[[int], None]], None] | None = None,
) -> None:
    """Serve in this process until a signal stops it.

    artifacts: folders by the names of models. attach: given what handles signals, where they come from the supervisor
    of several processes that share the port.
    """
    run_app(partial(create_app, artifacts, settings), settings, format_welcome, host, port, announce, attach)


def run_app(
    make_app: Callable[[], A],
    settings: Settings,
    describe: Callable[[A, Addresses], str],
    host: str,
    port: int,
    announce: Callable[[str], None],
    attach: Callable[[Callable[[int], None]], None] | None = None,
) -> None:
    """Serve an application in this process until a signal stops it.

    make_app: opens what it serves. describe: formats the line for a ready server. announce, attach: as of `run`.
    """
    certificate = load_certificate(settings)
    with ExitStack() as stack:
        if settings.log_format == "json" or settings.access_log:
            stack.enter_context(open_log(settings))
        listener = stack.enter_context(bind(host, port, shared=attach is not None))
        admin = None
        if settings.admin is not None:
            admin = open_admin(settings.admin)
            stack.callback(close_admin, admin, settings.admin)
        app = make_app()
        if settings.api_key_file is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, lambda *_: app.access.reload())
        listen(listener, host, port)
        host, port = listener.getsockname()[:2]

        def on_ready() -> None:
            grpc = server.grpc.port if server.grpc else None
            announce(describe(app, Addresses(host, port, grpc, format_address(admin) if admin is not None else "")))

        server = Server(app, settings, on_ready, certificate=certificate, admin=admin)
        if attach is not None:
            attach(lambda sig: app.access.reload() if sig == signal.SIGHUP else server.handle_exit(sig, None))
        server.run(sockets=[listener])


def leave(sig: int, frame: FrameType | None) -> None:
    """Exit on a signal before the server runs, or after it."""
    raise SystemExit(0)


def write_line(text: str) -> None:
    """Write a line to standard output, flushed: the process that started the server waits for it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":  # one of several processes that share the port
    front.main(run)
