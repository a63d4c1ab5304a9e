"""Greedy batching without a timer: an executor that is free takes what is queued.

An executor is one thread with one session. It waits for a first item, takes what is queued behind it up to the cap,
runs it, delivers the outputs, and repeats. A window of 5 ms gave no throughput and cost its full length when
there was little to do; under load the queue fills while the engine is busy, and batches grow by themselves.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from laconic.arrays import Arrays
from laconic.errors import DeadlineExceeded, NotReady, Overloaded
from laconic.runtimes.runtime import Session
from serve.layout import Batch, Cap, Layout, Part
from serve.statistics import Statistics


@dataclass(slots=True, eq=False)
class Item:
    """A part of a request in the queue, and the future of its outputs."""

    part: Part
    future: asyncio.Future[Arrays]
    queued_ns: int = field(default_factory=time.monotonic_ns)


class Batcher:
    """A queue and its executors. cap: the largest batch. limit: the most rows in the queue."""

    def __init__(
        self, sessions: Sequence[Session], layout: Layout, *, cap: Cap, limit: int, statistics: Statistics
    ) -> None:
        self.layout = layout
        self.cap = cap if layout.batched else Cap(1)
        self.limit = limit
        self.statistics = statistics
        self._queue: deque[Item] = deque()
        self._queued_rows = 0
        self._closed = False
        self._changed = threading.Condition()
        self._executors = [
            threading.Thread(target=self._execute, args=(session,), name=f"executor-{number}", daemon=True)
            for number, session in enumerate(sessions)
        ]
        for executor in self._executors:
            executor.start()

    @property
    def pending(self) -> int:
        """The number of parts of requests that wait for an executor."""
        with self._changed:
            return sum(not item.future.done() for item in self._queue)

    def submit(self, parts: Sequence[Part]) -> list[Item]:
        """Queue the parts of one request, each a batch at most: all of them, or none.

        Raises Overloaded if the queue has no room for them. A request larger than the whole queue is accepted when
        the queue is empty. From the event loop only; cancel an item's future to drop it.
        """
        loop = asyncio.get_running_loop()
        rows = sum(part.rows for part in parts)
        items = [Item(part, loop.create_future()) for part in parts]
        with self._changed:
            if self._closed:
                raise NotReady("the server is stopping. Try again, or try another replica")
            if self._queued_rows and self._queued_rows + rows > self.limit:
                self._drop_done()
            if self._queued_rows and self._queued_rows + rows > self.limit:
                raise Overloaded(
                    f"the queue is full: {self._queued_rows} of {self.limit} rows wait, and this request has {rows}. "
                    f"Try again later, or send less at a time"
                )
            self._queue.extend(items)
            self._queued_rows += rows
            self._changed.notify(len(items))
        return items

    def expire(self, items: Sequence[Item]) -> None:
        """Fail those of the items that no executor has taken yet. From the event loop only."""
        with self._changed:
            waiting = {id(item) for item in self._queue}
            for item in items:
                if id(item) in waiting and not item.future.done():
                    late = DeadlineExceeded("the request's timeout passed while it waited in the queue")
                    item.future.set_exception(late)

    def close(self) -> None:
        """Stop the executors after their running batches. Waiting items are dropped: their clients are disconnected."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        for executor in self._executors:
            executor.join()

    def _drop_done(self) -> None:
        self._queue = deque(item for item in self._queue if not item.future.done())
        self._queued_rows = sum(item.part.rows for item in self._queue)

    def _execute(self, session: Session) -> None:
        while batch := self._take():
            self._run(session, batch)

    def _take(self) -> list[Item]:
        """The next batch, or nothing when the batcher is closed."""
        with self._changed:
            while True:
                if batch := self._form():
                    return batch
                if self._closed:
                    return []
                self._changed.wait()

    def _form(self) -> list[Item]:
        """The oldest item, and those behind it that fit. Items that were cancelled or expired are dropped here.

        An item that does not fit keeps its place: it soon is the oldest, so that no shape starves another.
        """
        batch = Batch(self.layout, self.cap)
        taken: list[Item] = []
        left: list[Item] = []
        while self._queue and not batch.full:
            item = self._queue.popleft()
            if item.future.done():
                self._queued_rows -= item.part.rows
            elif batch.add(item.part):
                taken.append(item)
            else:
                left.append(item)
        self._queue.extendleft(reversed(left))
        self._queued_rows -= batch.rows
        return taken

    def _run(self, session: Session, batch: list[Item]) -> None:
        parts = [item.part for item in batch]
        started = time.monotonic_ns()
        answers: Sequence[Arrays | Exception]
        try:
            answers = self.layout.split_outputs(session.run(self.layout.join_inputs(parts)), parts)
        except Exception as error:  # noqa: BLE001 - engines raise anything, and the executor must live on
            if len(batch) > 1:
                # The rows of one item made the batch fail. Run one by one, only that item fails.
                for item in batch:
                    if not item.future.done():
                        self._run(session, [item])
                return
            answers = [error]
        self.statistics.count_batch(
            rows=sum(part.rows for part in parts),
            parts=len(parts),
            waited_ns=sum(started - item.queued_ns for item in batch),
            ran_ns=time.monotonic_ns() - started,
        )
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            batch[0].future.get_loop().call_soon_threadsafe(deliver, batch, answers)


def deliver(batch: Sequence[Item], answers: Sequence[Arrays | Exception]) -> None:
    """Set the result or the exception of each item. On the event loop."""
    for item, answer in zip(batch, answers, strict=True):
        if item.future.done():
            continue
        if isinstance(answer, Exception):
            item.future.set_exception(answer)
        else:
            item.future.set_result(answer)
