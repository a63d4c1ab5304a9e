"""The tokens of a request as they are written."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from laconic.errors import LaconicError
from laconic.runtimes.generator import GenerationRequest, TokenEvent
from serve.generation.generation_statistics import GenerationStatistics

TokenEvents = asyncio.Queue[TokenEvent | LaconicError]
"""The events of one request or several, as they come, and what ends one early."""


class WritingPhase(NamedTuple):
    """A part of the time that a request takes. start, end: as `time.monotonic_ns`. counts: numbers of tokens."""

    name: str
    start: int
    end: int
    counts: Mapping[str, int]


def read_event(event: TokenEvent | LaconicError) -> TokenEvent:
    """Return an event. Raises what ended a request."""
    if isinstance(event, LaconicError):
        raise event
    return event


class TokenStream:
    """What is written for one request: events in a queue, each choice until its last. From the event loop only.

    cancel: cancels a choice of the request in the engine, or all. events: where what is written goes. statistics: where
    its tokens are counted. open_choices: those that have not ended. started, began: when the request came, and when it
    held its blocks, as `time.monotonic_ns`. cached_tokens: of the prompt, those that a prefix cache had, once the
    engine has said so.
    """

    def __init__(
        self,
        request: GenerationRequest,
        cancel: Callable[[int, int | None], None],
        events: TokenEvents,
        statistics: GenerationStatistics,
    ) -> None:
        self.request = request
        self.statistics = statistics
        self.open_choices = set(range(request.sampling.n))
        self.started = self.began = time.monotonic_ns()
        self.cached_tokens: int | None = None
        self._cancel = cancel
        self._events = events
        self._first: int | None = None
        self._last: dict[int, int] = {}

    def put(self, event: TokenEvent | LaconicError) -> None:
        """Add an event, or what ends the request."""
        self._events.put_nowait(event)

    def time_token(self, choice: int, now: int) -> tuple[int, bool]:
        """Return the nanoseconds since a choice's last token, or since the request's beginning, and whether this token
        is its first. now: `time.monotonic_ns`."""
        last = self._last.get(choice)
        self._last[choice] = now
        self._first = self._first or now
        return now - (self.started if last is None else last), last is None

    def list_phases(self, written: int) -> Iterator[WritingPhase]:
        """Yield what the request went through up to now. written: tokens."""
        yield WritingPhase("queue", self.started, self.began, {})
        read = {"prompt_tokens": self.request.read_tokens}
        read |= {} if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        yield WritingPhase("prefill", self.began, self._first or time.monotonic_ns(), read)
        if self._first is not None:
            yield WritingPhase("decode", self._first, max(self._last.values()), {"generated_tokens": written})

    def cancel(self, choice: int | None = None) -> None:
        """End a choice, or all: their blocks are free within two steps of the engine."""
        if choice in self.open_choices or (choice is None and self.open_choices):
            self._cancel(self.request.id, choice)
