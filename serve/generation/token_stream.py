"""The tokens of a request as they are written."""

import asyncio
import time
from collections.abc import Callable

from laconic.errors import LaconicError
from laconic.runtimes.generator import GenerationRequest, TokenEvent

TokenEvents = asyncio.Queue[TokenEvent | LaconicError]
"""The events of one request or several, as they come, and what ends one early."""


def read_event(event: TokenEvent | LaconicError) -> TokenEvent:
    """Return an event. Raises what ended a request."""
    if isinstance(event, LaconicError):
        raise event
    return event


class TokenStream:
    """What is written for one request: events in a queue, each choice until its last. From the event loop only.

    cancel: cancels a choice of the request in the engine, or all. events: where what is written goes. open_choices:
    those that have not ended. started, began: when the request came, and when it held its blocks, as
    `time.monotonic_ns`.
    """

    def __init__(
        self, request: GenerationRequest, cancel: Callable[[int, int | None], None], events: TokenEvents
    ) -> None:
        self.request = request
        self.open_choices = set(range(request.sampling.n))
        self.started = self.began = time.monotonic_ns()
        self._cancel = cancel
        self._events = events
        self._last: dict[int, int] = {}

    def put(self, event: TokenEvent | LaconicError) -> None:
        """Add an event, or what ends the request."""
        self._events.put_nowait(event)

    def time_token(self, choice: int, now: int) -> tuple[int, bool]:
        """Return the nanoseconds since a choice's last token, or since the request's beginning, and whether this token
        is its first. now: `time.monotonic_ns`."""
        last = self._last.get(choice)
        self._last[choice] = now
        return now - (self.started if last is None else last), last is None

    def cancel(self, choice: int | None = None) -> None:
        """End a choice, or all: their blocks are free within two steps of the engine."""
        if choice in self.open_choices or (choice is None and self.open_choices):
            self._cancel(self.request.id, choice)
