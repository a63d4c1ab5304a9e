"""Counters of a model since the server started, under Triton's names."""

import time
from dataclasses import dataclass
from typing import Any


@dataclass
class Statistics:
    """Counters of one model; they only grow. Times in nanoseconds.

    requests: by outcome, with the time from the request's last byte to its answer's first. rows and batches: what the
    engine ran (rows / batches is the mean batch). waited: in the queue, summed over the parts of requests. ran: in the
    engine, summed over batches.
    """

    succeeded: int = 0
    failed: int = 0
    succeeded_ns: int = 0
    failed_ns: int = 0
    rows: int = 0
    batches: int = 0
    parts: int = 0
    waited_ns: int = 0
    ran_ns: int = 0
    last_ms: int = 0

    def count_request(self, started_ns: int, *, success: bool) -> None:
        """Count an answered request. started_ns: `time.monotonic_ns` when it was complete. From the event loop only."""
        lasted = time.monotonic_ns() - started_ns
        if success:
            self.succeeded += 1
            self.succeeded_ns += lasted
        else:
            self.failed += 1
            self.failed_ns += lasted
        self.last_ms = time.time_ns() // 1_000_000

    def count_wait(self, *, parts: int, waited_ns: int) -> None:
        """Count parts of requests that an executor took from the queue. Under the batcher's lock."""
        self.parts += parts
        self.waited_ns += waited_ns

    def count_batch(self, *, rows: int, ran_ns: int) -> None:
        """Count a batch that the engine ran. Under the batcher's lock."""
        self.rows += rows
        self.batches += 1
        self.ran_ns += ran_ns

    def describe(self, name: str, version: str) -> dict[str, Any]:
        """The counters as the statistics extension of the V2 protocol defines them; those not measured are 0."""
        none = {"count": 0, "ns": 0}
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_ms,
            "inference_count": self.rows,
            "execution_count": self.batches,
            "inference_stats": {
                "success": {"count": self.succeeded, "ns": self.succeeded_ns},
                "fail": {"count": self.failed, "ns": self.failed_ns},
                "queue": {"count": self.parts, "ns": self.waited_ns},
                "compute_input": none,
                "compute_infer": {"count": self.batches, "ns": self.ran_ns},
                "compute_output": none,
            },
            "batch_stats": [],
        }
