"""What is written of a window of a recording, divided into segments by its timestamps."""

from dataclasses import dataclass
from typing import Protocol

from laconic.arrays import Array


class SteppedRecording(Protocol):
    """A recording of any length, in steps of timestamps."""

    @property
    def step_seconds(self) -> float:
        """The seconds between a timestamp and the next."""

    @property
    def steps(self) -> int:
        """The steps up to its end."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in memory."""

    def count_steps(self, start: int) -> int:
        """Count the whole steps in the window that begins with a step."""

    def cut(self, start: int) -> Array:
        """Return the window that begins with a step, as a sample."""


class Timestamps(Protocol):
    """Tokens that are times."""

    @property
    def first(self) -> int:
        """The token of a window's beginning, which all others follow; that before it says that an answer has none."""


class TimedWriting(Protocol):
    """How texts with timestamps are written."""

    @property
    def timestamps(self) -> Timestamps:
        """The tokens that are times."""

    @property
    def begin(self) -> int:
        """The tokens in front of a text."""

    @property
    def max_new_tokens(self) -> int:
        """The most tokens of a window, those in front of its text included."""


@dataclass(frozen=True)
class TimedText:
    """What is said in a part of a recording, with the white space around it. start, end: in seconds. language: its
    code, where the model has several."""

    start: float
    end: float
    text: str
    language: str


@dataclass(frozen=True)
class TimedTokens:
    """What is said in a part of a window. start, end: in steps from the window's beginning. tokens: without times."""

    start: int
    end: int
    tokens: tuple[int, ...]


class TimedWindow:
    """The tokens of a window as they are written. A pair of times ends a segment and begins the next one.

    first: the token of the window's beginning. steps: of the window.
    """

    def __init__(self, first: int, steps: int) -> None:
        self._first = first
        self._steps = steps
        self._tokens: list[int] = []
        self._end: int | None = None

    def add(self, token: int) -> TimedTokens | None:
        """Add a token; return the segment that it completes."""
        self._tokens.append(token)
        if min(self._tokens[-2:]) < self._first or len(self._tokens) < 2:
            return None
        self._end = self._tokens[-2] - self._first
        segment = self._take(self._tokens[0] - self._first, self._end)
        self._tokens = [token]
        return segment

    def finish(self) -> tuple[TimedTokens | None, int]:
        """Return the last segment, if there is one more, and the steps to the next window.

        What follows the last pair was cut off by the end of the window, and is written again in the next, unless a
        time stands at its end: then nothing more is said in this window. Without a pair all is one segment.
        """
        times = [token - self._first for token in self._tokens if token >= self._first]
        if self._end is None:
            end = times[-1] if times and times[-1] else self._steps
            return self._take(0, end), self._steps
        if self._tokens[-1] >= self._first and len(self._tokens) > 1:
            return self._take(times[0], times[-1]), self._steps
        return None, self._end

    def _take(self, start: int, end: int) -> TimedTokens:
        return TimedTokens(start, end, tuple(token for token in self._tokens if token < self._first))
