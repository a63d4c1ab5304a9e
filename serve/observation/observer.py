"""What is told of each request beside its answer: its id, its line in the log, and its trace."""

import random
import time

from serve.asgi.wire import Headers, Message, Scope, Send
from serve.observation.logs import CURRENT, REQUEST_ID, choose_id, write_access
from serve.observation.tracing import TRACE, Trace, Tracing
from serve.security.keys import CALLER
from serve.settings.server_settings import Settings

HUNG_UP = 499
"""The status in the log of a request whose client hung up, as nginx has it."""


class RequestObserver:
    """Follows requests. Off, as by default, it costs a request a look at its headers."""

    def __init__(self, settings: Settings) -> None:
        self.tracing = Tracing.open(settings.otlp_endpoint) if settings.otlp_endpoint else None
        self._logged = settings.access_log
        self._identified = settings.log_format == "json" or settings.access_log > 0
        self.active = self._identified or self.tracing is not None
        """Whether anything is told of requests that bring no id."""

    def follow(self, scope: Scope, headers: Headers, send: Send) -> "Exchange | None":
        """Follow a request; return where to send its answer instead, or None where nothing is to be noted of it."""
        identifier = headers.get(REQUEST_ID)
        if identifier is None and not self.active:
            return None
        exchange = Exchange(scope, send)
        if identifier is not None or self._identified:
            exchange.identify(choose_id(identifier or b""))
        exchange.logged = random.random() < self._logged  # noqa: S311 - a sample
        if self.tracing is not None:
            exchange.trace = self.tracing.begin(f"{scope['method']} {scope['path']}", headers)
            TRACE.set(exchange.trace)
        return exchange

    def follow_call(self, method: str, metadata: Headers) -> None:
        """Follow a call over gRPC in the current task."""
        CURRENT.set(choose_id(metadata.get(REQUEST_ID, b"")).decode())
        if self.tracing is not None:
            TRACE.set(self.tracing.begin(method, metadata))

    def close(self) -> None:
        """Send the traces that wait."""
        if self.tracing is not None:
            self.tracing.close()


class Exchange:
    """A request and its answer, which goes through here. To be ended when the request is over."""

    __slots__ = ("_id", "_scope", "_send", "_started", "_status", "logged", "trace")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._started = time.monotonic()
        self._id: bytes | None = None
        self._status = HUNG_UP
        self.logged = False
        self.trace: Trace | None = None

    def identify(self, identifier: bytes) -> None:
        """Give the request an id, which is sent back."""
        self._id = identifier
        CURRENT.set(identifier.decode())

    async def __call__(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._id is not None:
                message = {**message, "headers": [*message["headers"], (REQUEST_ID, self._id)]}
        await self._send(message)

    def end(self) -> None:
        """Note that the request is over, answered or not."""
        caller = CALLER.get()
        name = caller.name if caller is not None else None
        if self.logged:
            write_access(self._scope, self._status, time.monotonic() - self._started, name)
        if self.trace is not None:
            self.trace.end(self._status, key=name, request_id=self._id.decode() if self._id else None)
