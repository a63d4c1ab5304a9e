"""Binomial checkpointing: which states of a chain to store and which to recompute (the revolve algorithm).

Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000), doi 10.1145/347837.347846.
"""

from collections.abc import Iterator
from math import comb
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One action of a schedule.

    advance: run forward from the current state to the one before `step`. store: keep the current state, which is the
    one before `step`, as a snapshot. restore: make the snapshot of `step` the current state. free: drop the snapshot of
    `step`. reverse: run `step` backward, for which the state before it is the current one.
    """

    kind: Literal["advance", "store", "restore", "free", "reverse"]
    step: int


def make_schedule(steps: int, snapshots: int) -> Iterator[Action]:
    """Yield the actions that reverse a chain of `steps` steps, the last one first, with at most `snapshots` stored
    states.

    The state before the first step is available at the start, and is one of the snapshots. No schedule runs fewer steps
    forward: `count_advances(steps, snapshots)`.
    """
    yield Action("store", 0)
    yield from _reverse(0, steps, snapshots - 1)


def _reverse(start: int, end: int, free: int) -> Iterator[Action]:
    """Reverse the steps from `end` - 1 to `start`, whose state is current and stored, with `free` more snapshots."""
    if free and end - start > 1:
        middle = start + _first_stride(end - start, free + 1)
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


def count_advances(steps: int, snapshots: int) -> int:
    """Count the forward steps with which a chain can be reversed, at least.

    It includes the initial forward sweep, and leaves out the forward run that each reversal makes of its own step: r n
    - C(s + r, s + 1) for n steps and s snapshots, with the least r for which C(s + r, s) >= n.
    """
    sweeps = _count_sweeps(steps, snapshots)
    return sweeps * steps - comb(snapshots + sweeps, snapshots + 1)


def _count_sweeps(steps: int, snapshots: int) -> int:
    """Count how often any step is run forward, at most."""
    sweeps = 0
    while comb(snapshots + sweeps, snapshots) < steps:
        sweeps += 1
    return sweeps


def _first_stride(steps: int, snapshots: int) -> int:
    """Return the number of steps between the first snapshot and the second."""
    sweeps = _count_sweeps(steps, snapshots)
    least = comb(snapshots + sweeps - 2, snapshots) if sweeps > 1 else 1
    return max(least, steps - comb(snapshots - 1 + sweeps, snapshots - 1))
