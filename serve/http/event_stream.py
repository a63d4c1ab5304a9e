"""Answers in pieces: server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from laconic.errors import INTERRUPTS, LaconicError, NotReady
from serve.asgi.wire import CONNECTION, Answer, ClientGone, Receive, Scope, Send, WhileConnected, to_json
from serve.requests.public_errors import to_public_error

EVENTS = b"text/event-stream; charset=utf-8"
UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
"""Headers by which proxies pass on each event as it comes."""
COMMENT = b":\n\n"
"""An event that clients skip."""
PROBE = 0.25
"""Seconds between two looks at whether a client that sends nothing more still reads."""
STOPPING = "the server stopped before this answer was whole. Try another replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStream(Answer):
    """An answer whose events are sent as they come. What goes wrong after the first becomes an event itself.

    events: one JSON value each, or bytes, which are sent as they are. end: called once, with what ended the stream
    early, if anything did. done: what is sent behind the last event. describe_error: makes an error an event.
    """

    scope: Scope
    receive: Receive
    events: AsyncGenerator[Any, None]
    end: Callable[[BaseException | None], None]
    done: bytes
    describe_error: Callable[[LaconicError], Any]

    async def send(self, send: Send) -> None:
        """Write the events to the connection until they end, or the client hangs up."""
        failure: BaseException | None = None
        probing = asyncio.ensure_future(self._probe(send))
        try:
            async with WhileConnected(self.scope, self.receive), aclosing(self.events) as events:
                headers = [(b"content-type", self.content_type), *UNBUFFERED, *self.headers]
                await send({"type": "http.response.start", "status": self.status, "headers": headers})
                async for event in events:
                    await send_piece(send, event if isinstance(event, bytes) else format_event(event))
                if self.done:
                    await send_piece(send, self.done)
        except ClientGone as error:
            failure = error
            return
        except INTERRUPTS:
            raise
        except BaseException as error:  # noqa: BLE001 - an exception that gets out costs the client its connection
            failure = NotReady(STOPPING) if isinstance(error, asyncio.CancelledError) else error
            await send_piece(send, format_event(self.describe_error(to_public_error(failure))))
        finally:
            probing.cancel()
            self.end(failure)
        await send({"type": "http.response.body", "body": b""})

    async def _probe(self, send: Send) -> None:
        """Send comments, while no event comes, to a client that sends nothing more: whether it has hung up shows only
        when something is sent to it."""
        connection: Any = self.scope.get(CONNECTION)
        while connection is not None:
            await asyncio.sleep(PROBE)
            if connection.half_closed and not connection.transport.is_closing():
                await send_piece(send, COMMENT)


def format_event(value: Any) -> bytes:
    """Format a server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


async def send_piece(send: Send, piece: bytes) -> None:
    """Send a part of a body that goes on."""
    await send({"type": "http.response.body", "body": piece, "more_body": True})
