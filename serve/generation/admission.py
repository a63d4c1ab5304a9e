"""Who may write next: requests hold the blocks of the cache that they may need, and wait in a queue for them."""

import asyncio
import math
from collections import deque
from typing import NamedTuple

from laconic.errors import DeadlineExceeded, NotReady, Overloaded
from laconic.runtimes.generator import BlockLedger, GenerationRequest

LONGEST_RETRY = 60
"""Seconds, at most, after which a client is told to try again."""
RECENT = 0.2
"""The weight of the last choice that ended in the average of how long choices hold their blocks."""


class QueueOverflow(Overloaded):
    """As many requests wait for blocks of the cache as may. retry_after: seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Waiting(NamedTuple):
    """A request in the queue, the name of its key, and what is resolved when it holds its blocks."""

    request: GenerationRequest
    key: str
    turn: "asyncio.Future[None]"


class Admission:
    """The queue in front of a cache. From the event loop only.

    Keys take turns by the blocks that their requests hold (start-time fair queueing, Goyal et al., 1996); the requests
    of a key begin first in, first out, and so do all of a server without keys. None overtakes the next one because it
    is smaller.

    ledger: of the cache. most: requests that may wait. is_open: whether requests may begin, as they may not while no
    engine runs.
    """

    def __init__(self, ledger: BlockLedger, most: int) -> None:
        self.ledger = ledger
        self.most = most
        self.is_open = True
        self._queue: deque[Waiting] = deque()
        self._blocks: dict[str, int] = {}
        self._clock = 0
        self._seconds = 1.0

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    async def enter(self, request: GenerationRequest, timeout: float, key: str = "") -> None:
        """Wait until the request holds its blocks. timeout: seconds. key: the name of whose it is.

        Raises InputError where it never can, QueueOverflow, DeadlineExceeded, and what `fail` is given.
        """
        self.ledger.check(request)
        if self.is_open and not self._queue and self.ledger.has_room(request):
            self._hold(request, key)
            return
        if len(self._queue) >= self.most:
            after = self._estimate_wait(request)
            raise QueueOverflow(
                f"{self.most} requests wait for room in the cache, the most that may. Try again in {after} s", after
            )
        entry = Waiting(request, key, asyncio.get_running_loop().create_future())
        self._queue.append(entry)
        try:
            async with asyncio.timeout(timeout):
                await entry.turn
        except TimeoutError:
            self._withdraw(entry)
            raise DeadlineExceeded(f"the cache had no room for this request for {timeout:g} s") from None
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise

    def release(self, request_id: int, choice: int, seconds: float | None = None) -> None:
        """Release the blocks of a choice that has ended. seconds: how long it held them, where it began."""
        self.ledger.release(request_id, choice)
        if seconds is not None:
            self._seconds += RECENT * (seconds - self._seconds)
        self._advance()

    def close(self) -> None:
        """Let no request begin until `reopen`; the cache is gone with all that it held."""
        self.is_open = False
        self.ledger = BlockLedger(self.ledger.total, self.ledger.block_tokens)

    def reopen(self) -> None:
        """Let requests begin."""
        self.is_open = True
        self._advance()

    def fail(self, error: NotReady) -> None:
        """Refuse all requests that wait."""
        while self._queue:
            turn = self._queue.popleft().turn
            if not turn.done():
                turn.set_exception(error)

    def _withdraw(self, entry: Waiting) -> None:
        """Take a request out of the queue, or release what it holds if it had its turn in this very moment."""
        if entry in self._queue:
            self._queue.remove(entry)
        elif not entry.turn.cancelled() and entry.turn.exception() is None:
            for choice in range(entry.request.sampling.n):
                self.ledger.release(entry.request.id, choice)
        self._advance()

    def _advance(self) -> None:
        """Let requests begin, as long as there is room for the next one."""
        while self.is_open and self._queue:
            entry = min(self._queue, key=lambda each: self._find_start(each.key))
            if not entry.turn.done():
                if not self.ledger.has_room(entry.request):
                    return
                self._hold(entry.request, entry.key)
                entry.turn.set_result(None)
            self._queue.remove(entry)

    def _find_start(self, key: str) -> int:
        """Find where the next request of a key stands among those of others. A key that had no request for a while has
        saved nothing up."""
        return max(self._blocks.get(key, 0), self._clock)

    def _hold(self, request: GenerationRequest, key: str) -> None:
        """Hold the blocks of a request, and count them for its key."""
        self.ledger.hold(request)
        self._clock = self._find_start(key)
        self._blocks = {name: blocks for name, blocks in self._blocks.items() if blocks > self._clock}
        self._blocks[key] = self._clock + self.ledger.count(request) * request.sampling.n

    def _estimate_wait(self, request: GenerationRequest) -> int:
        """Estimate the seconds until a request would have its turn, at the pace at which blocks came free."""
        ahead = [*(entry.request for entry in self._queue), request]
        blocks = sum(self.ledger.count(each) * each.sampling.n for each in ahead)
        return min(LONGEST_RETRY, max(1, math.ceil(self._seconds * blocks / self.ledger.total)))
