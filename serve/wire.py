"""Bodies in and answers out, as raw ASGI: what every route of the server shares.

Nothing here may hold more than the limit: a body is counted while it arrives, and while it is unpacked.
"""

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from laconic.errors import InputError, LaconicError, NotReady, Overloaded

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Mapping[bytes, bytes]

JSON = b"application/json"
BINARY = b"application/octet-stream"
WINDOW = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}
"""zlib's window bits, by content coding. HTTP's "deflate" is a zlib stream, not a raw one."""
COMPRESS_FROM = 1024
"""Bytes. Below it the headers outweigh the gain."""

log = logging.getLogger("laconic.serve")


class BodyTooLarge(InputError):
    """The body is larger than the server takes."""

    status = 413


class UnknownCoding(InputError):
    """The body is in a content coding that the server does not read."""

    status = 415


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
        await send({"type": "http.response.body", "body": self.body})


def to_answer(error: Exception) -> Answer:
    """What a client is told about an error: `{"error": "..."}`, as every V2 client expects.

    An error that nobody raised on purpose is logged, and told without its text, which may hold anything.
    """
    if not isinstance(error, LaconicError):
        log.error("a request failed", exc_info=error)
        return Answer(to_json({"error": f"the server failed ({type(error).__name__}); its log says more"}), 500)
    headers = []
    if isinstance(error, (Overloaded, NotReady)):
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if isinstance(error, BodyTooLarge):
        # What is left of the body will not be read: the connection is of no further use.
        headers.append((b"connection", b"close"))
    return Answer(to_json({"error": str(error)}), error.status, headers=headers)


def to_json(value: Any) -> bytes:
    """JSON. Arrays print in their own precision: 4.2 KB for 384 float32, where Python floats take 7.6 KB."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def from_json(body: bytes | memoryview) -> Any:
    """What the JSON holds. Raises InputError, also for a body nested too deep and for a bare NaN."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        text = bytes(body)
        hint = ""
        if b"NaN" in text or b"Infinity" in text:
            hint = ". JSON has no NaN and no Infinity: send such a tensor in binary (parameters.binary_data_size)"
        raise InputError(f"the body is not JSON: {error}{hint}") from None


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body, unpacked. limit: bytes, on the wire and unpacked.

    Raises BodyTooLarge before a byte is read where the length is announced, UnknownCoding, and ClientGone.
    """
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {int(announced)} bytes, more than the {limit} that this server takes")
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding != b"identity" and coding not in WINDOW:
        raise UnknownCoding(f"the body is in content coding {coding.decode('latin-1')!r}. Send gzip, deflate or none")
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"the body has more than the {limit} bytes that this server takes")
        chunks.append(chunk)
        more = message.get("more_body", False)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if coding == b"identity":
        return body
    # Off the event loop: 64 MiB take 0.3 s to unpack, and zlib lets other threads run meanwhile.
    return await asyncio.to_thread(unpack, body, coding, limit)


def unpack(body: bytes, coding: bytes, limit: int) -> bytes:
    """The body without its gzip or deflate; never more than `limit` bytes of it are made."""
    unpacker = zlib.decompressobj(WINDOW[coding])
    try:
        content = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise InputError(f"the body is not {coding.decode()}: {error}") from None
    if len(content) > limit:
        raise BodyTooLarge(f"the body unpacks to more than the {limit} bytes that this server takes")
    if not unpacker.eof:
        raise InputError(f"the {coding.decode()} body ends too early")
    return content


def pack(answer: Answer, headers: Headers) -> Answer:
    """The answer, compressed if the client asked for exactly one coding that we know.

    Clients in Python list all that they could read ("gzip, deflate, br") without meaning it. Level 1 takes 16 ms for a
    MiB of tensors and hardly makes them smaller, so such a list is answered plainly; tritonclient names one.
    """
    coding = headers.get(b"accept-encoding", b"").strip().lower()
    if coding not in WINDOW or len(answer.body) < COMPRESS_FROM:
        return answer
    packer = zlib.compressobj(1, zlib.DEFLATED, WINDOW[coding])
    body = packer.compress(answer.body) + packer.flush()
    return Answer(body, answer.status, answer.content_type, [*answer.headers, (b"content-encoding", coding)])


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel what is awaited inside as soon as the client hangs up, and raise ClientGone in its place.

    The body must have been read. A server that does not look computes for nobody: others ran 44 to 300 of 300
    abandoned requests.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = asyncio.ensure_future(receive())

    def leave(_: object) -> None:
        if not gone.cancelled():
            task.cancel()

    gone.add_done_callback(leave)
    try:
        yield
    except asyncio.CancelledError:
        if gone.done() and not gone.cancelled():
            task.uncancel()
            raise ClientGone from None
        raise
    finally:
        gone.remove_done_callback(leave)
        gone.cancel()
