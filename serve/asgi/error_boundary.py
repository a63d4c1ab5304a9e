"""What an application raises, answered: Starlette lets the panic of a library through, which is no Exception."""

import asyncio
from collections.abc import Awaitable, Callable

from laconic.errors import INTERRUPTS
from serve.asgi.wire import Message, Receive, Scope, Send, to_answer

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class ErrorBoundary:
    """Runs an application for one request. What it raises becomes the answer, if there is none yet."""

    __slots__ = ("_application", "_ended", "_send", "_started")

    def __init__(self, application: Application, send: Send) -> None:
        self._application = application
        self._send = send
        self._started = False
        self._ended = False

    async def run(self, scope: Scope, receive: Receive) -> None:
        """Answer the request. Raises what the application raises in the middle of its answer, which is then cut off."""
        try:
            await self._application(scope, receive, self._pass_on)
        except (*INTERRUPTS, asyncio.CancelledError):
            raise
        except BaseException as error:  # one that gets out costs the client its connection
            if not self._started:
                await to_answer(error).send(self._send)
            elif not self._ended:
                raise

    async def _pass_on(self, message: Message) -> None:
        self._started = True
        self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)
