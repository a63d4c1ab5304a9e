"""How fast the candidates are, side by side with the original, on this machine."""

from collections.abc import Mapping
from functools import partial

from laconic.measure import interleave, timings
from laconic.measured import Timing
from laconic.progress import Step
from laconic.runtimes.runtime import Session
from laconic.tasks.task import Task

LENGTH = 128
"""Of the free axes: tokens of a text."""

TRIAL_BATCHES = (1, 8)
BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 7

PATIENCE = 60.0
"""Seconds that the timing of one batch size may take; larger ones are left out where the original would need longer."""


def race(
    sessions: Mapping[str, Session],
    task: Task,
    *,
    baseline: str,
    batches: tuple[int, ...],
    threads: int,
    step: Step,
    length: int = LENGTH,
    rounds: int = ROUNDS,
    patience: float = PATIENCE,
) -> list[Timing]:
    """Time each session at each batch size; in each round every one runs once."""
    found: list[Timing] = []
    for batch in batches:
        inputs = task.typical(batch, length)
        actual = max((size for array in inputs.values() for size in array.shape[1:2]), default=1)
        runs = {name: partial(session.run, inputs) for name, session in sessions.items()}
        seconds = interleave(runs, rounds=rounds)
        found += timings(seconds, baseline, batch=batch, length=actual, threads=threads)
        step.advance()
        if sum(map(sum, seconds.values())) * 2 > patience:
            break
    return found
