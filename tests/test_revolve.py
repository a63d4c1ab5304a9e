"""The schedule of binomial checkpointing: held against its own rules, and against the best that there is."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.layerwise.revolve import count_advances, make_schedule

CHAINS = given(steps=st.integers(1, 60), snapshots=st.integers(1, 70))


def play(steps: int, snapshots: int) -> tuple[list[int], int, int]:
    """Steps reversed in order, forward steps run, states kept at most; every action is checked on the way."""
    state, kept, order, run, most = 0, set(), [], 0, 0
    for kind, step in make_schedule(steps, snapshots):
        if kind == "advance":
            assert step > state
            run += step - state
            state = step
        elif kind == "store":
            assert step == state
            kept.add(step)
            most = max(most, len(kept))
        elif kind == "restore":
            assert step in kept
            state = step
        elif kind == "free":
            kept.remove(step)
        else:
            assert step == state
            order.append(step)
    assert not kept
    return order, run, most


@cache
def best(steps: int, snapshots: int) -> int:
    """The fewest forward steps, by trying every place for the second snapshot."""
    if snapshots == 1 or steps == 1:
        return steps * (steps - 1) // 2
    return min(m + best(steps - m, snapshots - 1) + best(m, snapshots) for m in range(1, steps))


@CHAINS
def test_every_step_is_reversed_once_within_the_snapshots_and_the_runs_of_the_formula(steps, snapshots):
    order, run, most = play(steps, snapshots)
    assert order == list(reversed(range(steps)))
    assert most <= snapshots
    assert run == count_advances(steps, snapshots)


@pytest.mark.parametrize("snapshots", range(1, 8))
def test_the_formula_is_the_least_over_all_schedules(snapshots):
    assert [count_advances(steps, snapshots) for steps in range(1, 30)] == [
        best(steps, snapshots) for steps in range(1, 30)
    ]
