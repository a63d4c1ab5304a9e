"""Timing of sessions at several batch sizes."""

import itertools
import math

import numpy as np

from laconic.progress import Steps
from laconic.runtimes.runtime import Session
from laconic.tensor import TensorSpec
from laconic.timing.benchmark import LEAST_ROUNDS, ROUNDS, benchmark_sessions, is_settled


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


class Clock:
    """Seconds that runs take in turns, without end; each run asks twice."""

    def __init__(self, *seconds):
        self.seconds, self.now, self.asked = itertools.cycle(seconds), 0.0, 0

    def __call__(self):
        self.asked += 1
        self.now += 0 if self.asked % 2 else next(self.seconds)
        return self.now


def time_runs(*seconds, sizes=(1, 2, 4), **settings):
    """The numbers of runs at 1, 2 and 4 rows, where runs take these seconds in turns."""
    session = Counting()
    with Steps(quiet=True).step("time", 3) as step:
        benchmark_sessions(
            {"only": session}, Tokens(), baseline="only", batches=sizes, threads=1, step=step,
            clock=Clock(*seconds), **settings,
        )  # fmt: skip
    return [session.rows.count(rows) for rows in sizes]


WARM = 2
UNEVEN = (0.08, 0.16, 0.24)


def test_timing_stops_when_the_ratio_is_known_and_large_batches_of_a_slow_model_are_run_less_often():
    assert time_runs(0.1) == [WARM + LEAST_ROUNDS] * 3
    assert time_runs(*UNEVEN) == [WARM + ROUNDS] * 3
    one, *_, four = time_runs(0.5, 0.9, 0.7)
    assert (one, four) == (1 + ROUNDS, 1 + LEAST_ROUNDS)


def test_batches_that_would_take_too_long_are_left_out_unless_there_is_no_limit():
    assert time_runs(6.0) == [1 + LEAST_ROUNDS, 0, 0]
    assert time_runs(5.0, patience=math.inf) == [1 + ROUNDS] * 3


def test_large_batches_are_left_out_where_throughput_falls_and_they_take_long():
    slower = [*(0.2,) * 5, *(0.5,) * 4, *(1.2,) * 4]
    assert time_runs(*slower, sizes=(1, 2, 4, 8)) == [WARM + LEAST_ROUNDS, 1 + LEAST_ROUNDS, 1 + LEAST_ROUNDS, 0]
    brief = [each / 100 for each in (*(0.2,) * 5, *(0.5,) * 5, *(1.2,) * 5, *(3.0,) * 5)]
    assert time_runs(*brief, sizes=(1, 2, 4, 8)) == [WARM + LEAST_ROUNDS] * 4


def test_a_ratio_is_known_when_its_quartiles_are_close_whatever_the_times():
    slow, fast = np.array([4.0, 8.0, 6.0, 9.0]), np.array([2.0, 4.0, 3.0, 4.5])
    assert is_settled({"a": slow, "b": fast}, baseline="a", least=3)
    assert not is_settled({"a": slow, "b": fast, "c": np.sort(fast)}, baseline="a", least=3)
    assert not is_settled({"a": slow[:2], "b": fast[:2]}, baseline="a", least=3)
    assert not is_settled({"a": slow}, baseline="a", least=3), "of a lone session, the time"
