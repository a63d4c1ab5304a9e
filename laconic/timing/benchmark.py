"""Latency of several sessions at several batch sizes, in one interleaved run on this machine."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import geometric_mean

from laconic.arrays import Array
from laconic.progress import Step, Steps
from laconic.runtimes.runtime import Session
from laconic.tasks.task import Task
from laconic.timing.interleave import interleave, make_timings
from laconic.timing.measurements import Timing

LENGTH = 128
"""Default size of the dynamic axes: tokens of a text."""

TRIAL_BATCHES = (1, 8)
BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 7
LEAST_ROUNDS = 3
"""Rounds that quartiles can still be taken of, for models that take seconds a run."""

PATIENCE = 60.0
"""Seconds that timing one batch size may take; larger batch sizes are skipped if they are expected to take longer."""


def benchmark_sessions(
    sessions: Mapping[str, Session],
    task: Task,
    *,
    baseline: str,
    batches: tuple[int, ...],
    threads: int,
    step: Step,
    length: int = LENGTH,
    rounds: int = ROUNDS,
    least_rounds: int | None = None,
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time each session at each batch size, interleaved.

    baseline: the session that speed-ups are relative to. batches: in rows. length: size of the dynamic axes. rounds:
    runs of each; as few as `least_rounds`, where it is given, if the batches before say that they would take longer
    than a quarter of `patience`. patience: seconds per batch size. clock: see `interleave`.
    """
    found: list[Timing] = []
    row = 0.0
    for batch in batches:
        if least_rounds is not None and row:
            rounds = max(least_rounds, min(rounds, int(patience / 4 / (row * batch))))
        inputs = task.timed(batch, length)
        runs = {name: partial(session.run, inputs) for name, session in sessions.items()}
        seconds = interleave(runs, rounds=rounds, clock=clock)
        found += make_timings(seconds, baseline, batch=batch, length=find_free_length(inputs, task), threads=threads)
        row = sum(map(sum, seconds.values())) / rounds / batch
        step.advance()
        if row * rounds * batch * 2 > patience:
            break
    return found


def measure_speeds(sessions: Mapping[str, Session], task: Task, threads: int) -> dict[str, float]:
    """The speed of each session relative to the first, by name: the geometric mean over TRIAL_BATCHES.

    By processor time, so that other programs on the machine do not influence a choice by it.
    """
    with Steps(quiet=True).step("race", len(TRIAL_BATCHES)) as step:
        timings = benchmark_sessions(
            sessions,
            task,
            baseline=next(iter(sessions)),
            batches=TRIAL_BATCHES,
            threads=threads,
            step=step,
            clock=time.process_time,
        )
    return {name: geometric_mean(each.speedup for each in timings if each.engine == name) for name in sessions}


def find_free_length(inputs: Mapping[str, Array], task: Task) -> int:
    """Find the size of the longest dynamic axis other than the batch; 0 if there is none."""
    return max(
        (
            size
            for spec in task.inputs
            if spec.name in inputs
            for axis, size in zip(spec.shape[1:], inputs[spec.name].shape[1:], strict=True)
            if isinstance(axis, str)
        ),
        default=0,
    )
