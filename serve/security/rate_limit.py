"""Rates, by token buckets."""

import math
import time

from laconic.errors import Overloaded


class RateLimited(Overloaded):
    """The caller has used its rate up. retry_after: whole seconds until the same request is accepted."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TokenBucket:
    """So many tokens a second, of which those of one second can be saved. what: what a token stands for, in messages.

    While one is left, any number can be taken: before the body of a request is read, nobody knows how many it will be.
    The debt has to be paid back before the next.
    """

    def __init__(self, rate: float, what: str) -> None:
        self.rate = rate
        self.what = what
        self.capacity = max(1.0, rate)
        self._tokens = self.capacity
        self._filled = time.monotonic()

    def take(self, count: int, now: float) -> None:
        """Take tokens. now: by `time.monotonic`. Raises RateLimited where none is left."""
        self._tokens = min(self.capacity, self._tokens + (now - self._filled) * self.rate)
        self._filled = now
        if self._tokens < 1:
            seconds = math.ceil((1 - self._tokens) / self.rate)
            raise RateLimited(
                f"this key may use {self.rate:g} {self.what} per second, and has. Try again in {seconds} s", seconds
            )
        self._tokens -= count
