"""Counters of a model since the server started, under Triton's names."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from laconic.errors import DeadlineExceeded, LaconicError, NotReady, Overloaded
from serve.asgi.wire import ClientGone
from serve.batching.buckets import Buckets

REJECTED, CANCELED, BACKEND, OTHER = "REJECTED", "CANCELED", "BACKEND", "OTHER"
"""Triton's reasons for a failure: not accepted, nobody waits any more, the engine failed, and a wrong request."""

ROWS = tuple(2**power for power in range(11))


@dataclass
class Statistics:
    """Counters of one model; they only grow. Times in nanoseconds.

    succeeded_ns, failed_ns: the time from the requests' last bytes to their answers' first, summed. failures: requests
    by reason. rows: what the engine ran. sizes: of each number of rows, the batches that had it and their time in the
    engine. request: the time of each request that succeeded. encode: of reading its
    samples or tensors and encoding them. queue: of each part of a request in the queue. engine: of each batch, and
    batch: its rows. write: of making each answer from the outputs.
    """

    succeeded: int = 0
    succeeded_ns: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys((REJECTED, CANCELED, BACKEND, OTHER), 0))
    failed_ns: int = 0
    rows: int = 0
    last_ms: int = 0
    request: Buckets = field(default_factory=Buckets)
    encode: Buckets = field(default_factory=Buckets)
    queue: Buckets = field(default_factory=Buckets)
    engine: Buckets = field(default_factory=Buckets)
    batch: Buckets = field(default_factory=lambda: Buckets(ROWS))
    write: Buckets = field(default_factory=Buckets)
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """The number of requests that failed."""
        return sum(self.failures.values())

    @property
    def batches(self) -> int:
        """The number of batches that the engine ran."""
        return self.engine.count

    def count_success(self, started_ns: int) -> None:
        """Count an answered request. started_ns: `time.monotonic_ns` when it was complete. From the event loop only."""
        lasted = time.monotonic_ns() - started_ns
        self.succeeded += 1
        self.succeeded_ns += lasted
        self.request.observe(lasted)
        self.last_ms = time.time_ns() // 1_000_000

    def count_failure(self, started_ns: int, error: BaseException) -> None:
        """Count a request that is answered with an error, or with nothing. From the event loop only."""
        self.failures[find_reason(error)] += 1
        self.failed_ns += time.monotonic_ns() - started_ns
        self.last_ms = time.time_ns() // 1_000_000

    def count_waits(self, waited_ns: Iterable[int]) -> None:
        """Count parts of requests that an executor took from the queue. Under the batcher's lock."""
        for waited in waited_ns:
            self.queue.observe(waited)

    def count_batch(self, *, rows: int, ran_ns: int) -> None:
        """Count a batch that the engine ran. Under the batcher's lock."""
        self.rows += rows
        self.engine.observe(ran_ns)
        self.batch.observe(rows)
        count, ns = self.sizes.get(rows, (0, 0))
        self.sizes[rows] = count + 1, ns + ran_ns


def find_reason(error: BaseException) -> str:
    """Find Triton's reason for a failure."""
    if isinstance(error, (Overloaded, NotReady)):
        return REJECTED
    if isinstance(error, (DeadlineExceeded, ClientGone, asyncio.CancelledError)):
        return CANCELED
    return OTHER if isinstance(error, LaconicError) and error.status < 500 else BACKEND
