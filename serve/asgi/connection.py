"""A connection with deadlines: for headers, for the body, between requests, and for the client to take its answer.

Uvicorn bounds only the time between requests, so that a client which sends half of something keeps its connection, and
what has arrived of it, for ever. Instead of a timer for each deadline, all connections are looked at twice a second.
"""

import asyncio
import math
import socket
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.asgi.answer_sender import AnswerSender
from serve.asgi.wire import CONNECTION, JSON, Scope, to_json
from serve.settings.server_settings import Settings


class Phase(Enum):
    """What a connection waits for; before the first request, headers."""

    REQUEST = "request"
    HEADERS = "headers"
    BODY = "body"
    ANSWER = "answer"


STATUS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
PROBE = 0.05
"""Seconds between two looks at whether a client that sends nothing more still reads."""
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An answer before the answer, which every client of HTTP/1.1 skips."""


class Connection(HttpToolsProtocol):
    """HTTP/1.1 over one connection, within the limits of the settings.

    admin: whether the client asks where operators do. half_closed: whether the client sends nothing more. on_lost:
    called when the connection is lost, for the request that is being answered.
    """

    def __init__(self, *arguments: Any, settings: Settings, admin: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.settings = settings
        self.admin = admin
        self.phase = Phase.HEADERS
        self.since = self.loop.time()
        self.received = 0
        self.paused_since = math.inf
        self.half_closed = False
        self.on_lost: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self.refuse(503, f"the server has {self.settings.max_connections} connections, the most that it takes")

    @property
    def local(self) -> bool:
        """Whether the connection came through a unix socket, whose file says who may use it."""
        return self.server is not None and self.server[1] is None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        waited_for = self.phase
        super().data_received(data)
        settings = self.settings
        if self.phase is Phase.BODY:
            self.received += len(data)
        elif self.phase is Phase.HEADERS:
            # Where headers begin within the data, a body may be in front of them.
            self.received += len(data) if waited_for is Phase.HEADERS else min(len(data), settings.max_headers)
            if self.received > settings.max_headers:
                self.refuse(431, f"the headers have more than the {settings.max_headers} bytes that this server takes")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if the client has sent a whole request, and may still read its answer.

        TLS cannot be closed on one side alone.
        """
        if self.phase is not Phase.ANSWER or self.scheme == "https":
            return False
        self.half_closed = True
        self.loop.call_later(PROBE, self.probe, False)
        return True

    def probe(self, sent: bool) -> None:
        """Find out, until the answer begins, whether a client that sends nothing more has hung up.

        To TCP both are the same, until something is sent to the client: where nobody reads it, the connection is reset.
        sent: whether something was.
        """
        if self.transport.is_closing() or self.cycle.response_started:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not sent and not self.pipeline and self.scope["http_version"] == "1.1":
            self.transport.write(INTERIM)
            sent = True
        self.loop.call_later(PROBE, self.probe, sent)

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "the request is not valid HTTP/1.1")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.enter(Phase.HEADERS)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cast(Scope, self.scope)[CONNECTION] = self
        self.cycle.send = AnswerSender(self.cycle)  # type: ignore[assignment, method-assign]
        self.enter(Phase.BODY)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.enter(Phase.REQUEST if self.cycle.response_complete else Phase.ANSWER)

    def on_response_complete(self) -> None:
        """End an answer as Uvicorn does, without a timer for the next request, of which there is the deadline."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.half_closed:
            self.transport.close()
        elif self.phase is Phase.ANSWER:
            self.enter(Phase.REQUEST)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.paused_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.paused_since = math.inf

    def enter(self, phase: Phase) -> None:
        """Begin to wait for something else."""
        self.phase = phase
        self.since = self.loop.time()
        self.received = 0

    @property
    def deadline(self) -> float:
        """The time, by the event loop's clock, at which the client has had long enough."""
        settings = self.settings
        write = self.paused_since + settings.write_timeout
        if self.phase is Phase.ANSWER or self.flow.read_paused:
            return write
        if self.phase is Phase.BODY:
            # What follows a refusal is thrown away: a client that has not read it yet must not be reset.
            earned = 0 if self.cycle.response_complete else self.received / settings.min_body_rate
            return min(write, self.since + settings.body_timeout + earned)
        return min(
            write, self.since + (settings.header_timeout if self.phase is Phase.HEADERS else settings.keep_alive)
        )

    def enforce(self, now: float) -> None:
        """Close the connection if its deadline has passed. now: by the event loop's clock."""
        if self.transport.is_closing() or now < self.deadline:
            return
        if self.paused_since < math.inf:
            self.transport.abort()
        else:
            self.cut(408, f"the {self.phase.value} of the request did not arrive in time")

    def cut(self, status: int, error: str) -> None:
        """Close the connection, with an answer to a request that has arrived in part."""
        if self.received and self.phase in (Phase.HEADERS, Phase.BODY):
            self.refuse(status, error)
        else:
            self.transport.close()

    def refuse(self, status: int, error: str) -> None:
        """Close the connection, with an answer where the client can know to which request."""
        if self.phase is Phase.BODY:
            unanswered = not self.cycle.response_started
        else:
            unanswered = self.cycle is None or self.cycle.response_complete
        if unanswered:
            body = to_json({"error": error})
            head = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, STATUS[status], JSON, len(body)) + body)
        self.transport.close()


def enforce_deadlines(connections: Iterable[asyncio.Protocol], now: float) -> None:
    """Close those connections whose clients took too long."""
    for connection in list(connections):
        if isinstance(connection, Connection):
            connection.enforce(now)
