"""The number of threads of a run on a CPU, which follows the share of the cores that other processes leave it."""

import math
import os
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from train.callbacks.callback import RunLog, StepReport

THREADS = Path("/proc/self/task")
VARIABLE = "OMP_NUM_THREADS"
INTERVAL = 2.0
"""Seconds between two looks, at least."""

MUCH, LITTLE = 0.2, 0.05
"""Shares of the time in which threads that could run wait for a core: above the first, threads are given up; below the
second, more of them are tried."""

FIRST_QUIET, LAST_QUIET = 4.0, 60.0
"""Seconds of little waiting before more threads are tried: at first, and at most. They double with each failed try."""

Times = Mapping[str, tuple[int, int]]
"""By thread, nanoseconds that it ran, and that it could have run and waited for a core."""


class ThreadBalance(RunLog):
    """Has torch use no more threads than there are cores for.

    The threads of an operation wait for one another at its end, without sleeping. Where one of them has to wait for its
    core, the others use up the time of theirs: a run with a thread for each of two cores, beside four other processes,
    kept 0.17 of its speed, and one that gave up a thread 0.22 to 0.26.
    """

    def __init__(self) -> None:
        self._most = torch.get_num_threads()
        self._times: Times = {}  # from the first step on: loading keeps more threads waiting than training does
        self._looked = -math.inf
        self._quiet, self._needed, self._is_trying = 0.0, FIRST_QUIET, False

    def step(self, report: StepReport) -> None:
        """Look whether the threads wait for cores, where the last look is long ago."""
        now = time.monotonic()
        if self._most > 1 and now - self._looked >= INTERVAL:
            times = read_thread_times()
            if self._times:
                self.adapt(compute_wait_share(self._times, times), now - self._looked)
            self._times, self._looked = times, now

    def adapt(self, share: float, seconds: float) -> None:
        """Set the number of threads. share: of waiting, in the last seconds."""
        threads = torch.get_num_threads()
        fewer = max(1, round(threads * (1 - share)))
        if share > MUCH and fewer < threads:
            self._needed = min(2 * self._needed, LAST_QUIET) if self._is_trying else FIRST_QUIET
            self._quiet, self._is_trying = 0.0, False
            torch.set_num_threads(fewer)
            return
        self._quiet = self._quiet + seconds if share < LITTLE else 0.0
        self._is_trying = False
        if threads < self._most and self._quiet >= self._needed:
            self._quiet, self._is_trying = 0.0, True
            torch.set_num_threads(min(2 * threads, self._most))


@contextmanager
def balance_threads(device: torch.device, techniques: Container[str]) -> Iterator[list[RunLog]]:
    """Yield what has the threads of a run follow the load of the machine, which is told of its steps; afterwards torch
    has as many as before. Nothing does on a GPU, where OMP_NUM_THREADS gives their number, or where the system does not
    tell how long they wait; nor where `compile` is among the techniques, since a model is compiled again for each
    number of threads."""
    before = torch.get_num_threads()
    is_free = device.type == "cpu" and VARIABLE not in os.environ and "compile" not in techniques
    try:
        yield [ThreadBalance()] if is_free and read_thread_times() else []
    finally:
        torch.set_num_threads(before)


def read_thread_times() -> Times:
    """Read the times of this process's threads; none where the system does not keep them."""
    times = {}
    for thread in THREADS.glob("*"):
        try:
            ran, waited, _ = map(int, (thread / "schedstat").read_text().split())
        except (OSError, ValueError):  # the thread has ended, or the kernel counts nothing
            continue
        times[thread.name] = ran, waited
    return times


def compute_wait_share(before: Times, after: Times) -> float:
    """Compute the share of waiting in the time in which threads could run, over those that are in both readings."""
    ran, waited = (
        sum(after[thread][kind] - before[thread][kind] for thread in after.keys() & before.keys()) for kind in (0, 1)
    )
    return waited / max(ran + waited, 1)
