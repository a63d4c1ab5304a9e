"""Latency of several sessions at several batch sizes, in one interleaved run on this machine."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import geometric_mean

import numpy as np

from laconic.arrays import Array
from laconic.progress import Step, Steps
from laconic.runtimes.runtime import Session
from laconic.tasks.decoder_tensors import NEW_TOKENS
from laconic.tasks.processing import Processing
from laconic.timing.measurements import Timing, WritingSpeed

LENGTH = 128
"""Default size of the dynamic axes: tokens of a text."""

TRIAL_BATCHES = (1, 8)
BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 7
LEAST_ROUNDS = 3
"""Rounds that quartiles can still be taken of, for models that take seconds a run and ratios that are known."""

SETTLED = 0.02
"""A ratio is known when its quartiles are this close, relative to it: an engine must be faster by 5 % to be chosen
before a preferred one."""

PATIENCE = 12.0
"""Seconds that timing one batch size may take; larger batch sizes are skipped if they are expected to take longer.
Without a limit, seven rounds of ResNet-50's shape at six batch sizes took 154 of its 365 seconds."""

COSTLY = 1.0
"""Seconds of the rounds of a batch size that is left out where throughput falls: an OCR network that is fastest at 4
rows spent a third of the time of its measurement on 32."""
FALLEN = 0.05
"""The share of throughput that the last two batch sizes must have lost for that."""


def benchmark_sessions(
    sessions: Mapping[str, Session],
    task: Processing,
    *,
    baseline: str,
    batches: tuple[int, ...],
    threads: int,
    step: Step,
    length: int = LENGTH,
    rounds: int = ROUNDS,
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time each session at each batch size, interleaved.

    baseline: the session that speed-ups are relative to. batches: in rows. length: size of the dynamic axes. rounds:
    runs of each; as few as LEAST_ROUNDS when the ratios are known by then, or when the batches before say that more
    would take longer than a quarter of `patience`. patience: seconds per batch size, and nothing larger is run that
    takes COSTLY seconds once throughput falls; infinite: all rounds of all batches are run. clock: see `interleave`.
    """
    timings: list[Timing] = []
    least = min(LEAST_ROUNDS, rounds)
    enough = partial(is_settled, baseline=baseline, least=least) if patience < math.inf else None
    row = 0.0
    for batch in batches:
        expected = row * batch
        if expected * least > patience or (expected * least > COSTLY and is_falling(timings) and patience < math.inf):
            break
        most = rounds if expected == 0 or math.isinf(patience) else int(patience / 4 / expected)
        inputs = task.timed(batch, length)
        runs = {name: partial(session.run, inputs) for name, session in sessions.items()}
        seconds = interleave(runs, rounds=max(least, min(rounds, most)), clock=clock, enough=enough)
        timings += make_timings(seconds, baseline, batch=batch, length=find_free_length(inputs, task), threads=threads)
        row = sum(map(sum, seconds.values())) / len(seconds[baseline]) / batch
        step.advance()
    return timings


def measure_writing(
    sessions: Mapping[str, Session], task: Processing, *, length: int = LENGTH, rounds: int = ROUNDS
) -> list[WritingSpeed]:
    """Measure how fast each session writes a lone answer, interleaved; nothing for a task whose model does not write.

    length: of the prompt. The time to the first token is that of an answer of one token; the others' is what a longer
    answer takes beyond it.
    """
    inputs = task.timed(1, length)
    if NEW_TOKENS not in inputs:
        return []
    count = int(inputs[NEW_TOKENS])
    runs = {
        f"{name}, {tokens}": partial(session.run, {**inputs, NEW_TOKENS: np.array(tokens)})
        for name, session in sessions.items()
        for tokens in (1, count)
    }
    seconds = {name: np.array(values) for name, values in interleave(runs, rounds=rounds).items()}
    prompt = find_free_length(inputs, task)
    speeds = []
    for name in sessions:
        first, whole = (float(np.median(seconds[f"{name}, {tokens}"])) for tokens in (1, count))
        # Of a tiny model the difference may be noise: it is no less than a tenth of the whole.
        rest = max(whole - first, whole / 10)
        speeds.append(WritingSpeed(engine=name, prompt=prompt, first_token=first, tokens_per_second=(count - 1) / rest))
    return speeds


def is_falling(timings: Sequence[Timing]) -> bool:
    """Return whether the last two batch sizes gave no session a throughput near its best."""
    engines = {each.engine: [one.rows_per_second for one in timings if one.engine == each.engine] for each in timings}
    return bool(engines) and all(max(rates[-2:]) < (1 - FALLEN) * max(rates) for rates in engines.values())


def is_settled(seconds: Mapping[str, Sequence[float]], *, baseline: str, least: int) -> bool:
    """Return whether the ratio of each session to the baseline is known, by at least `least` rounds; of a lone session,
    its time. seconds: of each run."""
    if len(seconds[baseline]) < least:
        return False
    ratios = [np.array(seconds[baseline]) / np.array(values) for name, values in seconds.items() if name != baseline]
    quartiles = [np.percentile(each, [25, 50, 75]) for each in ratios or seconds.values()]
    return all(high - low <= SETTLED * middle for low, middle, high in quartiles)


def measure_speeds(sessions: Mapping[str, Session], task: Processing, threads: int) -> dict[str, float]:
    """Measure the speed of each session relative to the first, by name: the geometric mean over TRIAL_BATCHES.

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


def find_free_length(inputs: Mapping[str, Array], task: Processing) -> int:
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


Runs = Mapping[str, Callable[[], object]]

LONG = 0.25
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

    warmup: runs of each before, one where a run takes LONG. clock: perf_counter for the latency that a user sees;
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
