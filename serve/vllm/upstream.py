"""HTTP/1.1 to a server behind a unix socket, a connection for each request: to close it ends what the server does."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import httptools

from laconic.errors import NotReady

READ = 1 << 16
"""Bytes that are read at once."""
EVENT_END = b"\n\n"
LOST = "vLLM ended before this answer was whole. Try again"


class ResponseReader:
    """What httptools calls while it reads a response."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.content_type = b""
        self.has_head = self.is_complete = False
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Read bytes of the connection; none at its end. Raises NotReady where the response is not whole."""
        if not data:
            raise NotReady(LOST)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            raise NotReady(LOST) from None

    def take(self) -> bytes:
        """Return what has come of the body since the last call."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.content_type = value

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


class UpstreamAnswer:
    """A response whose body is read as it comes. To be closed, which hangs up where there is more to come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, response: ResponseReader) -> None:
        self.status: int = response.parser.get_status_code()
        self.content_type = response.content_type
        self._reader, self._writer, self._response = reader, writer, response

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the body. Raises NotReady where it ends too early."""
        while True:
            if piece := self._response.take():
                yield piece
            if self._response.is_complete:
                return
            self._response.feed(await read_some(self._reader))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the body, none of them in part. Raises as `pieces`."""
        rest = b""
        async for piece in self.pieces():
            whole, end, rest = (rest + piece).rpartition(EVENT_END)
            if end:
                yield whole + end

    async def read(self) -> bytes:
        """Return the whole body, and close. Raises as `pieces`."""
        try:
            return b"".join([piece async for piece in self.pieces()])
        finally:
            self.close()

    def close(self) -> None:
        """Hang up."""
        self._writer.transport.abort()


async def ask(socket: Path, method: str, path: str, body: bytes = b"", identifier: str = "") -> UpstreamAnswer:
    """Send a request, and wait for the head of its response. identifier: of the request, empty for none.

    Raises NotReady where the server is not there or hangs up. Cancellation closes the connection.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
    except OSError:
        raise NotReady("vLLM takes no connections at present. Try again") from None
    response = ResponseReader()
    try:
        writer.write(format_request(method, path, body, identifier) + body)
        while not response.has_head:
            response.feed(await read_some(reader))
    except BaseException:
        writer.transport.abort()
        raise
    return UpstreamAnswer(reader, writer, response)


def format_request(method: str, path: str, body: bytes, identifier: str) -> bytes:
    """Format the head of a request."""
    lines = [f"{method} {path} HTTP/1.1", "host: vllm", "connection: close"]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    if identifier:
        lines.append(f"x-request-id: {identifier}")
    return "\r\n".join([*lines, "", ""]).encode()


async def read_some(reader: asyncio.StreamReader) -> bytes:
    """Return what comes next; nothing at the end, or where the connection is reset."""
    try:
        return await reader.read(READ)
    except OSError:
        return b""
