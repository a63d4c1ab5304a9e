"""Greedy batching without a timer: an executor that is free takes what is queued.

An executor is one thread with one session. It waits for a first item, takes what is queued behind it up to the cap,
runs it, delivers the outputs, and repeats. A window of 5 ms gave no throughput and cost its full length when
there was little to do; under load the queue fills while the engine is busy, and batches grow by themselves.

A model whose batches take less time than waking a thread has no executors: the event loop runs what one round of
reading from the connections has brought.
"""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from laconic.arrays import Arrays
from laconic.errors import INTERRUPTS, DeadlineExceeded, NotReady, Overloaded
from laconic.runtimes.runtime import Session
from serve.batching.batch_run import BatchTiming, EngineRun, explain, run_batch
from serve.batching.fair_queue import FairQueue, Flow, Item
from serve.batching.layout import Cap, Layout, Part
from serve.batching.statistics import Statistics
from serve.batching.throughput import Throughput

SHARED = 1.0
"""Seconds after a small request in which bulk requests leave one executor free for the next."""


class QueueFull(Overloaded):
    """A request would wait longer than requests may. retry_after: whole seconds until there is room."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Batcher:
    """A queue and its executors.

    cap: the largest batch. max_wait: the most seconds that a request is to wait. inline: the event loop runs the
    batches, in the first session.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        layout: Layout,
        *,
        cap: Cap,
        max_wait: float,
        statistics: Statistics,
        inline: bool = False,
    ) -> None:
        self.layout = layout
        self.cap = cap if layout.batched else Cap(1)
        self.max_wait = max_wait
        self.statistics = statistics
        self.throughput = Throughput(1 if inline else len(sessions), self.cap.rows)
        self._queue = FairQueue(layout, self.cap)
        self._last_small = -math.inf
        self._running_bulk = 0
        self._bulk_formed = False
        self._closed = False
        self._changed = threading.Condition()
        self._counting = threading.Lock()
        self.inline = sessions[0] if inline else None
        self._due = False
        self.executors = [
            threading.Thread(target=self._execute, args=(session,), name=f"executor-{number}", daemon=True)
            for number, session in enumerate(() if inline else sessions)
        ]
        for executor in self.executors:
            executor.start()

    @property
    def pending(self) -> int:
        """The number of parts of requests that wait for an executor."""
        with self._changed:
            return sum(len(flow.items) for flow in (*self._queue.small, *self._queue.bulk))

    def check_room(self, rows: int) -> None:
        """Raise QueueFull where a request of so many rows would wait too long, and NotReady when the server stops.

        From the event loop only, as all that announces requests and drops them.
        """
        if self._closed:
            raise NotReady("the server is stopping. Try again, or try another replica")
        ahead = self._queue.rows_ahead(rows)
        wait = ahead * self.throughput.seconds_per_row
        if wait > self.max_wait:
            after = max(1, math.ceil(wait - self.max_wait))
            raise QueueFull(
                f"the queue is full: {ahead} rows would run first and take about {wait:.1f} s, and requests may wait "
                f"{self.max_wait:g} s. Try again in {after} s, or send less at a time",
                after,
            )

    def open(self, rows: int, parts: Sequence[Part] = ()) -> tuple[Flow, list[Item]]:
        """Announce a request of so many rows, before any work is done for it. Every flow must be closed with `drop`.

        parts: those that are queued at once. Raises what `check_room` raises.
        """
        self.check_room(rows)
        flow = self._queue.open(rows)
        items = make_items(flow, parts)
        if not flow.bulk:
            self._last_small = time.monotonic()
        with self._changed:
            self._queue.announce(flow)
            self._put(flow, items)
        return flow, items

    def extend(self, flow: Flow, rows: int) -> None:
        """Announce further rows of a request that turned out to be larger. Raises DeadlineExceeded if it expired."""
        with self._changed:
            if flow.error is not None:
                raise flow.error
            self._queue.extend(flow, rows)

    def submit(self, flow: Flow, parts: Sequence[Part]) -> list[Item]:
        """Queue parts of a request, each a batch at most. Raises DeadlineExceeded if it has expired meanwhile."""
        items = make_items(flow, parts)
        with self._changed:
            if flow.error is not None:
                raise flow.error
            self._put(flow, items)
        return items

    def run_at_once(self, inputs: Arrays, rows: int) -> Arrays | None:
        """Run a request that needs no queue, where the event loop runs the batches.

        inputs: of one batch at most, in arrays of their own. None where the queue has to answer: with executors, and
        when the engine fails.
        """
        if self.inline is None or rows > self.cap.rows:
            return None
        started = time.monotonic_ns()
        try:
            outputs = self.inline.run(inputs)
        except INTERRUPTS:
            raise
        except BaseException:  # noqa: BLE001 - engines raise anything
            return None
        self.statistics.count_batch(rows=rows, ran_ns=time.monotonic_ns() - started)
        self.statistics.queue.observe(0)
        return outputs

    def _put(self, flow: Flow, items: Sequence[Item]) -> None:
        if items:
            self._queue.put(flow, items)
            if self.inline is None:
                self._changed.notify(len(items))
            elif not self._due:
                self._due = True
                asyncio.get_running_loop().call_soon(self._run_inline, self.inline)

    def drop(self, flow: Flow) -> None:
        """Forget what no executor has taken of a request. From the event loop only."""
        if not flow.rows and not flow.bulk:
            return
        with self._changed:
            dropped = self._queue.drop(flow)
        for item in dropped:
            item.future.cancel()

    def expire(self, flow: Flow) -> None:
        """Fail what no executor has taken of a request. From the event loop only."""
        with self._changed:
            if not flow.rows:
                return
            flow.error = DeadlineExceeded("the request's timeout passed while it waited in the queue")
            dropped = self._queue.drop(flow)
        for item in dropped:
            item.future.set_exception(flow.error)

    def close(self) -> None:
        """Stop the executors after their running batches. Waiting items are dropped: their clients are disconnected."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for executor in self.executors:
            executor.join()

    def _execute(self, session: Session) -> None:
        batch, bulk = self._take(ran_bulk=False)
        while batch:
            try:
                answers = self._answer(session, batch)
            except BaseException as error:  # noqa: BLE001 - SystemExit would end this thread alone, and its batch would wait
                answers = [explain(error)] * len(batch)
            with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                batch[0].future.get_loop().call_soon_threadsafe(deliver, batch, answers)
            batch, bulk = self._take(ran_bulk=bulk)

    def _take(self, *, ran_bulk: bool) -> tuple[list[Item], bool]:
        """Take the next batch; return it and whether it is of bulk requests alone, or nothing when the batcher is
        closed.

        ran_bulk: whether the last batch was of bulk requests alone.
        """
        with self._changed:
            self._running_bulk -= ran_bulk
            while not self._closed:
                # Beside bulk rows that run already, or have just run, a batch of small requests takes no more of them.
                with_bulk = not self._running_bulk and not self._bulk_formed
                if batch := self._queue.form_small(with_bulk=with_bulk):
                    self._bulk_formed = batch[0].flow.bulk
                    return batch, False
                shared_for = self._last_small + SHARED - time.monotonic()
                alone = len(self.executors) == 1
                free = shared_for <= 0 or alone or self._running_bulk < len(self.executors) - 1
                if free and (batch := self._queue.form_bulk(once=alone and shared_for > 0)):
                    self._bulk_formed = True
                    self._running_bulk += 1
                    return batch, True
                self._changed.wait(shared_for if self._queue.bulk else None)
            return [], False

    def _run_inline(self, session: Session) -> None:
        """Run one batch on the event loop, and have the next run after what else the loop has to do."""
        batch = self._queue.form_small(with_bulk=True) or self._queue.form_bulk(once=False)
        self._due = bool(self._queue.small or self._queue.bulk)
        if self._due:
            asyncio.get_running_loop().call_soon(self._run_inline, session)
        if batch:
            deliver(batch, self._answer(session, batch))

    def _answer(self, session: Session, batch: list[Item]) -> list[Arrays | Exception]:
        """Run a batch and count it."""
        started = time.monotonic_ns()
        runs: list[EngineRun] = []
        answers = run_batch(session, self.layout, [item.part for item in batch], runs)
        ran = BatchTiming(started, time.monotonic_ns(), len(batch), runs)
        for item in batch:
            item.batch = ran
        with self._counting:
            for run in runs:
                self.throughput.count(run.rows, run.ns / 1e9)
                self.statistics.count_batch(rows=run.rows, ran_ns=run.ns)
            self.statistics.count_waits(started - item.queued_ns for item in batch)
        return answers


def make_items(flow: Flow, parts: Sequence[Part]) -> list[Item]:
    """Make the parts of a request as items for the queue. On the event loop."""
    loop = asyncio.get_running_loop()
    return [Item(flow, part, loop.create_future()) for part in parts]


def deliver(batch: Sequence[Item], answers: Sequence[Arrays | Exception]) -> None:
    """Set the result or the exception of each item. On the event loop."""
    for item, answer in zip(batch, answers, strict=True):
        if item.future.done():
            continue
        if isinstance(answer, Exception):
            item.future.set_exception(answer)
        else:
            item.future.set_result(answer)
