"""Bodies of requests, within bounds: of bytes on the wire, unpacked and over all connections, and of JSON elements."""

import zlib
from typing import Any

import orjson

from laconic.errors import InputError
from serve.asgi.wire import WINDOW, ClientGone, Headers, Receive
from serve.requests.memory_budget import BodyTooLarge, Reservation
from serve.requests.offload import OFFLOAD_FROM, offload
from serve.settings.server_settings import Settings

SCANNED = 1 << 18
"""Bytes of JSON that are counted in one go: 0.2 ms, and then other threads may run."""
CONTAINER = 10
"""Elements that a list or an object counts for: the garbage collector visits it again and again. 20 million empty lists
in 60 MB took 24 s, in which no other thread ran."""
UNPACKED = 1 << 16
"""Bytes of a compressed body that are unpacked in one go: of each member of gzip, zlib copies what follows it there."""
MEMBERS = 10_000
"""The most members of a gzip body. Each takes some microseconds, however small it is."""
ELEMENT_BYTES = 32
"""Memory of a number in a Python list."""


class UnknownCoding(InputError):
    """The body is in a content coding that the server does not read."""

    status = 415


async def read_body(headers: Headers, receive: Receive, limit: int, reservation: Reservation) -> bytes:
    """Read the whole body, unpacked. limit: bytes, on the wire and unpacked.

    Raises BodyTooLarge before a byte is read where the length is announced, UnknownCoding, Overloaded, and ClientGone.
    """
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and (len(announced) > len(str(limit)) or int(announced) > limit):
        raise BodyTooLarge(f"the body has {announced.decode()} bytes, more than the {limit} that this server takes")
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
        reservation.add(len(chunk))
        chunks.append(chunk)
        more = message.get("more_body", False)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if coding == b"identity":
        return body
    # zlib lets other threads run meanwhile: 64 MiB take 0.3 s to unpack.
    content = await offload(unpack, body, coding, limit, long=size > OFFLOAD_FROM)
    reservation.add(len(content))
    return content


def unpack(body: bytes, coding: bytes, limit: int) -> bytes:
    """Return the body without its gzip or deflate; never more than `limit` bytes of it are made.

    A gzip body has one member or several, one behind the other. Raises BodyTooLarge, and InputError for anything else.
    """
    contents, size, position, members = [], 0, 0, 0
    unpacker = zlib.decompressobj(WINDOW[coding])
    while position < len(body):
        piece = body[position : position + UNPACKED]
        try:
            content = unpacker.decompress(piece, limit + 1 - size)
        except zlib.error as error:
            raise InputError(f"the body is not {coding.decode()}: {error}") from None
        contents.append(content)
        size += len(content)
        if size > limit:
            raise BodyTooLarge(f"the body unpacks to more than the {limit} bytes that this server takes")
        position += len(piece) - len(unpacker.unused_data)
        if unpacker.eof and position < len(body):
            members += 1
            if coding != b"gzip":
                raise InputError(f"the {coding.decode()} body goes on behind its end")
            if members == MEMBERS:
                raise InputError(f"the gzip body has more than {MEMBERS} members")
            unpacker = zlib.decompressobj(WINDOW[coding])
    if not unpacker.eof:
        raise InputError(f"the {coding.decode()} body ends too early")
    return b"".join(contents)


async def read_json(body: bytes, settings: Settings, reservation: Reservation) -> Any:
    """Read the JSON of a body, off the event loop if it is long. Raises what `from_json` raises."""
    if len(body) <= OFFLOAD_FROM:
        return from_json(body, settings)
    reservation.add(ELEMENT_BYTES * await offload(count_elements, body, settings, long=True))
    return await offload(parse, body, long=True)


def from_json(body: bytes, settings: Settings) -> Any:
    """Read what the JSON holds. Raises BodyTooLarge, and InputError for anything else, also a bare NaN."""
    count_elements(body, settings)
    return parse(body)


def count_elements(body: bytes, settings: Settings) -> int:
    """Count the elements of the JSON at most, by its commas and opening brackets, before anything is made of them.

    Raises BodyTooLarge, and InputError for more elements than the settings allow.
    """
    if len(body) > settings.max_json:
        raise BodyTooLarge(
            f"the JSON has {len(body)} bytes, more than the {settings.max_json} that this server takes. "
            f"Send tensors in binary, and images as files"
        )
    elements = 0
    if CONTAINER * len(body) <= settings.max_json_elements:
        return elements
    for start in range(0, len(body), SCANNED):
        piece = body[start : start + SCANNED]
        elements += piece.count(b",") + CONTAINER * (piece.count(b"[") + piece.count(b"{"))
        if elements > settings.max_json_elements:
            raise InputError(
                f"the JSON has more than the {settings.max_json_elements} elements that this server takes, of which a "
                f"list or an object counts as {CONTAINER}. Send tensors in binary, or several requests"
            )
    return elements


def parse(body: bytes) -> Any:
    """Parse JSON. Raises InputError, also for a body nested too deep and for a bare NaN."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        hint = ""
        if b"NaN" in body or b"Infinity" in body:
            hint = ". JSON has no NaN and no Infinity: send such a tensor in binary (parameters.binary_data_size)"
        raise InputError(f"the body is not JSON: {error}{hint}") from None
