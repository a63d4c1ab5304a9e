"""When to keep a state and when to compute it again: binomial checkpointing."""

from collections.abc import Iterator
from math import comb
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """advance: run forward from the present state to that before `step`. store: keep the present state, which is that
    before `step`. restore: make a kept state the present one. free: keep it no longer. reverse: take `step` back, for
    which the state before it is present."""

    kind: Literal["advance", "store", "restore", "free", "reverse"]
    step: int


def schedule(steps: int, snapshots: int) -> Iterator[Action]:
    """How to take back a chain of `steps` steps, the last one first, with at most `snapshots` states kept at a time.

    The state before the first step is present at the start, and is one of the snapshots. No schedule runs fewer steps
    forward: `advances(steps, snapshots)`. Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).
    """
    yield Action("store", 0)
    yield from _reverse(0, steps, snapshots - 1)


def _reverse(start: int, end: int, free: int) -> Iterator[Action]:
    """Take back the steps from `end` - 1 to `start`, whose state is present and kept, with `free` more to keep."""
    if free and end - start > 1:
        middle = start + _stride(end - start, free + 1)
        yield Action("advance", middle)
        yield Action("store", middle)
        yield from _reverse(middle, end, free - 1)
        yield Action("restore", start)
        yield from _reverse(start, middle, free)
        return
    for step in reversed(range(start, end)):
        if step < end - 1:
            yield Action("restore", start)
        if step > start:
            yield Action("advance", step)
        else:
            yield Action("free", start)
        yield Action("reverse", step)


def advances(steps: int, snapshots: int) -> int:
    """The fewest forward steps with which a chain can be taken back, the first sweep counted, and the one that each
    reversal makes for itself not: r n - C(s + r, s + 1), n steps, s snapshots, the least r for which C(s + r, s) >= n.
    """
    sweeps = _sweeps(steps, snapshots)
    return sweeps * steps - comb(snapshots + sweeps, snapshots + 1)


def _sweeps(steps: int, snapshots: int) -> int:
    """How often a step is run forward at most."""
    sweeps = 0
    while comb(snapshots + sweeps, snapshots) < steps:
        sweeps += 1
    return sweeps


def _stride(steps: int, snapshots: int) -> int:
    """How far from the first snapshot the second is."""
    sweeps = _sweeps(steps, snapshots)
    least = comb(snapshots + sweeps - 2, snapshots) if sweeps > 1 else 1
    return max(least, steps - comb(snapshots - 1 + sweeps, snapshots - 1))
