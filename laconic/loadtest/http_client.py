"""HTTP/1.1 over one connection that is kept open: requests as bytes, one at a time.

A load generator shares its machine with the server, so its own cost matters: an answer takes 40 us of processor time
here, and 500 with a client that is made for everything.
"""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult

import httptools

from laconic.errors import LaconicError


class ConnectionFailed(LaconicError):
    """The server cannot be reached, hung up, or answered something other than HTTP."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The status and the body of a response."""

    status: int
    body: bytes


class HttpClient(asyncio.Protocol):
    """A connection to a server. Not for concurrent requests: open one connection per concurrent request."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[HttpAnswer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []

    @classmethod
    async def connect(cls, url: SplitResult) -> Self:
        """Open a connection to the host of an http or https address. Raises ConnectionFailed."""
        secure = url.scheme == "https"
        try:
            _, client = await asyncio.get_running_loop().create_connection(
                cls,
                url.hostname or "localhost",
                url.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
            )
        except OSError as error:
            raise ConnectionFailed(f"cannot connect to {url.netloc}: {error.strerror or error}") from None
        return client

    @property
    def usable(self) -> bool:
        """Whether the connection takes another request."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes) -> HttpAnswer:
        """Send a whole request and wait for its answer. Raises ConnectionFailed. Cancellation closes the connection."""
        if not self.usable:
            raise ConnectionFailed("the server closed the connection")
        assert self._transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        except asyncio.CancelledError:
            self._transport.abort()
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("the server closed the connection before it answered")

    def _fail(self, reason: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionFailed(reason))

    # What the parser calls.

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        answer = HttpAnswer(self._parser.get_status_code(), b"".join(self._chunks))
        self._chunks.clear()
        if not self._parser.should_keep_alive():
            self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(answer)
