"""Interleaved timing: candidates take turns in each round, so that other load on the machine affects all of them."""

import time
from collections.abc import Callable, Mapping

import numpy as np

from laconic.timing.measurements import Timing

Runs = Mapping[str, Callable[[], object]]

LONG = 1.0
"""Seconds of a run after which another to warm up changes nothing."""


def interleave(
    contestants: Runs,
    *,
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    enough: Callable[[Mapping[str, list[float]]], bool] | None = None,
) -> dict[str, list[float]]:
    """Time each candidate `rounds` times; in each round every candidate runs once, in a rotating order.

    warmup: runs of each before, one where a run takes a second. clock: perf_counter for the latency that a user sees;
    process_time for comparisons while other programs use the cores. enough: of the seconds so far, whether they
    suffice. Returns the seconds of each run, by candidate.
    """
    names = list(contestants)
    for name in names:
        for _ in range(warmup):
            start = clock()
            contestants[name]()
            if clock() - start > LONG:
                break
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            contestants[name]()
            seconds[name].append(clock() - start)
        if enough is not None and enough(seconds):
            break
    return seconds


def make_timings(
    seconds: Mapping[str, list[float]], baseline: str, *, batch: int, length: int, threads: int
) -> list[Timing]:
    """Summarize the runs as one Timing per candidate; the speed-up is the median over rounds of baseline / candidate.

    seconds: as `interleave` returns them. batch: rows; length: size of the longest dynamic axis.
    """
    results = []
    for name, values in seconds.items():
        ratios = np.array(seconds[baseline]) / np.array(values)
        low, median, high = np.percentile(values, [25, 50, 75])
        slow, ratio, fast = np.percentile(ratios, [25, 50, 75])
        results.append(
            Timing(
                engine=name,
                batch=batch,
                length=length,
                threads=threads,
                seconds=float(median),
                quartiles=(float(low), float(high)),
                speedup=float(ratio),
                speedup_quartiles=(float(slow), float(fast)),
            )
        )
    return results
