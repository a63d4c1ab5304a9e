"""An ASGI `send` that writes an answer at once where Uvicorn writes its head and its body apart.

A write costs the kernel as much as all that Uvicorn itself does for a small request.
"""

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from serve.asgi.wire import Message


class AnswerSender:
    """The `send` of one request. Holds the head of the answer back until there is something of its body."""

    __slots__ = ("_cycle", "_start")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        """Send a message of the application. Raises what Uvicorn raises for one that is out of place."""
        cycle, start = self._cycle, self._start
        if message["type"] == "http.response.start" and start is None:
            self._start = message
            return
        self._start = None
        if start is not None:
            if self._write(start, message):
                return
            await RequestResponseCycle.send(cycle, start)  # type: ignore[arg-type]
        await RequestResponseCycle.send(cycle, message)  # type: ignore[arg-type]

    def _write(self, start: Message, message: Message) -> bool:
        """Write head and body together; only a whole answer to a plain request. Returns whether it was one."""
        cycle, body = self._cycle, message.get("body", b"")
        if (
            message.get("more_body", False)
            or cycle.response_started
            or cycle.disconnected
            or cycle.flow.write_paused
            or not cycle.keep_alive
            or cycle.scope["method"] == "HEAD"
        ):
            return False
        headers = [*cycle.default_headers, *start.get("headers", ())]
        lines = [STATUS_LINE[start["status"]]]
        length = None
        for name, value in headers:
            if name == b"content-length":
                length = value
            elif name == b"connection":
                return False
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        # One line each: a line break within a header would begin an answer of somebody else's making.
        if length != b"%d" % len(body) or head.count(b"\n") != len(headers) + 2:
            return False
        cycle.transport.write(head + body)
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True
