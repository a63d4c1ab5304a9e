"""A queue that is fair between requests: each gives a batch one item in turn, whatever its size.

A request with more rows than one batch is bulk, all others are small. A batch of small ones is not filled with bulk
rows, which would multiply the time that it takes. No threads and no clock in here; the batcher has both.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from laconic.arrays import Arrays
from serve.batching.batch_run import BatchTiming
from serve.batching.layout import Batch, Cap, Layout, Part


@dataclass(slots=True, eq=False)
class Item:
    """A part of a request in the queue, the future of its outputs, and the batch that it ran in."""

    flow: "Flow"
    part: Part
    future: asyncio.Future[Arrays]
    queued_ns: int = field(default_factory=time.monotonic_ns)
    batch: BatchTiming | None = None


@dataclass(slots=True, eq=False)
class Flow:
    """A request on its way through the queue.

    rows: those that no batch has taken, in the queue or still to come. items: those in the queue, in their order.
    waits: whether the queue knows the flow. error: why it takes no further items.
    """

    rows: int
    bulk: bool
    items: deque[Item] = field(default_factory=deque)
    skipped: list[Item] = field(default_factory=list)
    waits: bool = False
    error: Exception | None = None

    def take(self, batch: Batch) -> Item | None:
        """Move the first item that fits into the batch. Those before it are skipped until `restore`."""
        while self.items:
            item = self.items.popleft()
            if batch.add(item.part):
                self.rows -= item.part.rows
                return item
            self.skipped.append(item)
        return None

    def restore(self) -> bool:
        """Put skipped items back in their places. Returns whether items wait."""
        if self.skipped:
            self.items.extendleft(reversed(self.skipped))
            self.skipped.clear()
        self.waits = bool(self.items)
        return self.waits


class FairQueue:
    """Requests by their turns, small ones and bulk ones apart."""

    def __init__(self, layout: Layout, cap: Cap) -> None:
        self.layout = layout
        self.cap = cap
        self.small: deque[Flow] = deque()
        self.bulk: deque[Flow] = deque()
        self.small_rows = 0
        self._bulk_flows: set[Flow] = set()

    def open(self, rows: int) -> Flow:
        """Make the flow of a request of so many rows."""
        return Flow(rows, bulk=rows > self.cap.rows)

    def announce(self, flow: Flow) -> None:
        """Count the rows of a request among those to come."""
        if flow.bulk:
            self._bulk_flows.add(flow)
        else:
            self.small_rows += flow.rows

    def extend(self, flow: Flow, rows: int) -> None:
        """Count further rows of an announced request; it stays small or bulk."""
        flow.rows += rows
        if not flow.bulk:
            self.small_rows += rows

    def put(self, flow: Flow, items: Sequence[Item]) -> None:
        """Append items to the flow."""
        flow.items.extend(items)
        if not flow.waits:
            flow.waits = True
            (self.bulk if flow.bulk else self.small).append(flow)

    def drop(self, flow: Flow) -> list[Item]:
        """Forget the rows of a flow that no batch has taken. Returns those of its items that waited."""
        if flow.bulk:
            self._bulk_flows.discard(flow)
        else:
            self.small_rows -= flow.rows
        flow.rows = 0
        dropped = list(flow.items)
        flow.items.clear()
        return dropped

    def rows_ahead(self, rows: int) -> int:
        """Count the rows that run before a new request of so many has run: in turns, a larger request gives no more."""
        return self.small_rows + sum([min(flow.rows, rows) for flow in self._bulk_flows])

    def form_small(self, *, with_bulk: bool) -> list[Item]:
        """Form a batch of small requests. with_bulk: each bulk request has its turn too, with one item."""
        if not self.small:
            return []
        batch = Batch(self.layout, self.cap)
        bulk: list[Item] = []
        if with_bulk and self.bulk:
            bulk, self.bulk = take_in_turns(batch, self.bulk, once=True)
        bulk_rows = batch.rows
        taken, self.small = take_in_turns(batch, self.small)
        self.small_rows -= batch.rows - bulk_rows
        return bulk + taken

    def form_bulk(self, *, once: bool) -> list[Item]:
        """Form a batch of bulk requests. once: one item of each, however much space is left."""
        taken, self.bulk = take_in_turns(Batch(self.layout, self.cap), self.bulk, once=once)
        return taken


def take_in_turns(batch: Batch, turns: deque[Flow], *, once: bool = False) -> tuple[list[Item], deque[Flow]]:
    """Fill the batch with an item of each flow in turn, in rounds until it is full or nothing fits.

    Returns the items, and the flows that still wait. Those from which nothing was taken keep their places: the first
    of them opens the next batch, so that no length starves another. The others go behind.
    """
    taken: list[Item] = []
    passed: list[Flow] = []
    served: deque[Flow] = deque()
    while turns and not batch.full:
        flow = turns.popleft()
        item = flow.take(batch)
        if item is None:
            passed.append(flow)
            continue
        taken.append(item)
        if flow.items or flow.skipped:
            served.append(flow)
        else:
            flow.waits = False
    if not passed and not served:
        return taken, turns
    spent: list[Flow] = []
    while served and not once and not batch.full:
        flow = served.popleft()
        item = flow.take(batch)
        if item is None:
            spent.append(flow)
        else:
            taken.append(item)
            served.append(flow)
    first, last = ([flow for flow in flows if flow.restore()] for flows in (passed, [*served, *spent]))
    return taken, deque([*first, *turns, *last])
