"""Answers, errors and connections as raw ASGI: what every route of the server shares."""

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from laconic.errors import LaconicError, NotReady, Overloaded
from serve.requests.public_errors import to_public_error

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Mapping[bytes, bytes]

JSON = b"application/json"
BINARY = b"application/octet-stream"
WINDOW = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}
"""zlib's window bits, by content coding. HTTP's "deflate" is a zlib stream, not a raw one."""
WRITTEN = 1 << 18
"""Bytes that are handed to the connection at once. The next wait until the client has taken most of them."""
CONNECTION = "laconic.connection"
"""The key of a scope under which our own connections put themselves."""
CLOSE = (b"connection", b"close")
"""The header of an answer to a client that may or may not send its body now: what comes next is not known."""
COMPRESS_FROM = 1024
"""Bytes. Below it the headers outweigh the gain."""

log = logging.getLogger("laconic.serve")


class ClientGone(Exception):
    """The client hung up; nobody waits for an answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, whole."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def send(self, send: Send) -> None:
        """Write it to the connection."""
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        if len(self.body) <= WRITTEN:
            await send({"type": "http.response.body", "body": self.body})
            return
        view = memoryview(self.body)
        for start in range(0, len(view), WRITTEN):
            piece = bytes(view[start : start + WRITTEN])
            await send({"type": "http.response.body", "body": piece, "more_body": start + WRITTEN < len(view)})


def to_answer(error: BaseException) -> Answer:
    """Make the answer to a request that failed: `{"error": "..."}`, as every V2 client expects."""
    public = to_public_error(error)
    return Answer(to_json({"error": str(public)}), public.status, headers=retry_headers(public))


def retry_headers(error: LaconicError) -> list[tuple[bytes, bytes]]:
    """Return the header that says when to try again, where that helps."""
    return [(b"retry-after", b"%d" % error.retry_after)] if isinstance(error, (Overloaded, NotReady)) else []


def to_json(value: Any) -> bytes:
    """Print JSON. Arrays print in their own precision: 4.2 KB for 384 float32, where Python floats take 7.6 KB."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def pack(answer: Answer, headers: Headers) -> Answer:
    """Compress the answer if the client asked for exactly one coding that we know.

    Clients in Python list all that they could read ("gzip, deflate, br") without meaning it. Level 1 takes 16 ms for a
    MiB of tensors and hardly makes them smaller, so such a list is answered plainly; tritonclient names one.
    """
    coding = headers.get(b"accept-encoding", b"").strip().lower()
    if coding not in WINDOW or len(answer.body) < COMPRESS_FROM:
        return answer
    packer = zlib.compressobj(1, zlib.DEFLATED, WINDOW[coding])
    body = packer.compress(answer.body) + packer.flush()
    return Answer(body, answer.status, answer.content_type, [*answer.headers, (b"content-encoding", coding)])


class WhileConnected:
    """Cancels what is awaited in the body as soon as the client hangs up, and raises ClientGone in its place.

    The request's body must have been read. A server that does not look computes for nobody: others ran 44 to 300 of
    300 abandoned requests. Our own connections tell; to watch another's `receive` takes a task, a tenth of the cost of
    a request.
    """

    __slots__ = ("_connection", "_gone", "_lost", "_receive", "_task")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._connection: Any = scope.get(CONNECTION)
        self._receive = receive
        self._gone: asyncio.Future[Message] | None = None
        self._lost = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        if self._connection is None:
            self._gone = asyncio.ensure_future(self._receive())
            self._gone.add_done_callback(self._leave)
        elif self._connection.transport.is_closing():
            raise ClientGone
        else:
            self._connection.on_lost = self._leave

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._gone is None:
            self._connection.on_lost = None
        else:
            self._gone.remove_done_callback(self._leave)
            self._gone.cancel()
        if self._lost and isinstance(error, asyncio.CancelledError):
            assert self._task is not None
            self._task.uncancel()
            raise ClientGone from None

    def _leave(self, gone: "asyncio.Future[Message] | None" = None) -> None:
        if gone is None or not gone.cancelled():
            self._lost = True
            assert self._task is not None
            self._task.cancel()
