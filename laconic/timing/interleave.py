"""Time several things side by side, so that whatever else the machine does hits them alike."""

import time
from collections.abc import Callable, Mapping

import numpy as np

from laconic.timing.measurements import Timing

Runs = Mapping[str, Callable[[], object]]


def interleave(
    contestants: Runs, *, rounds: int, warmup: int = 2, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each run, by contestant. In each round every contestant runs once, in an order that rotates.

    clock: perf_counter for what a user waits; process_time to compare, where other programs want the cores as well.
    """
    names = list(contestants)
    for name in names:
        for _ in range(warmup):
            contestants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            contestants[name]()
            seconds[name].append(clock() - start)
    return seconds


def make_timings(
    seconds: Mapping[str, list[float]], baseline: str, *, batch: int, length: int, threads: int
) -> list[Timing]:
    """One Timing per contestant; the speed-up is the median over rounds of baseline / contestant."""
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
