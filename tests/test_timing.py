"""Timing of sessions at several batch sizes."""

import itertools

import numpy as np

from laconic.progress import Steps
from laconic.runtimes.runtime import Session
from laconic.tensor import TensorSpec
from laconic.timing.benchmark import LEAST_ROUNDS, ROUNDS, benchmark_sessions


class Counting(Session):
    """Counts its runs by their rows."""

    def __init__(self):
        self.rows = []

    def run(self, inputs):
        self.rows.append(len(inputs["ids"]))
        return {}


class Tokens:
    """The part of a task that timing needs."""

    inputs = (TensorSpec(name="ids", dtype="int64", shape=("batch", "seq")),)

    def timed(self, batch, length):
        return {"ids": np.zeros((batch, length), np.int64)}


def time_runs(seconds, **settings):
    """The numbers of runs at 1, 2 and 4 rows, where each run takes `seconds`."""
    session, ticks = Counting(), itertools.count(step=seconds)
    with Steps(quiet=True).step("time", 3) as step:
        benchmark_sessions(
            {"only": session}, Tokens(), baseline="only", batches=(1, 2, 4), threads=1, step=step,
            clock=lambda: next(ticks), **settings,
        )  # fmt: skip
    return [session.rows.count(rows) - 2 for rows in (1, 2, 4)]


def test_large_batches_of_a_slow_model_are_run_less_often_where_that_is_allowed():
    assert time_runs(0.01, least_rounds=LEAST_ROUNDS) == [ROUNDS] * 3
    assert time_runs(2.0, least_rounds=LEAST_ROUNDS) == [ROUNDS, 3, 3]
    assert time_runs(2.0) == [ROUNDS] * 3


def test_batches_that_would_take_too_long_are_left_out():
    assert time_runs(6.0) == [ROUNDS, -2, -2]
