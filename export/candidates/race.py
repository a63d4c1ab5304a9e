"""Timing of candidates against the original, interleaved: all briefly for the choice, the chosen one at length."""

import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from export.candidates.candidate import EngineCandidate, mean_speedup
from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.models.source import Source
from laconic.progress import Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan_file import digest_plan
from laconic.tasks.task import Task
from laconic.timing.benchmark import BATCHES, TRIAL_BATCHES, benchmark_sessions, measure_writing
from laconic.timing.measurements import DEFAULT_KNEE, ORIGINAL, Measurements, Timing, WritingSpeed, find_knee


def race(
    candidates: Sequence[EngineCandidate], source: Source, task: Task, graph: Graph, cache: Cache, steps: Steps
) -> list[EngineCandidate]:
    """Return the candidates with their speed-ups over the source, timed if their engines are here. task: of the
    candidates.

    Timings are cached, so that the same run chooses the same candidate on the same machine.
    """
    if any(candidate.option.reference for candidate in candidates):
        return list(candidates)
    key = f"raced-{make_race_key(candidates, source, graph)}"
    speedups = cache.json(key, partial(time_candidates, candidates, source, task, steps))
    return [replace(candidate, speedup=speedups[candidate.name]) for candidate in candidates]


def make_race_key(candidates: Sequence[EngineCandidate], source: Source, graph: Graph) -> str:
    """Return the digest of everything that the speed-ups of candidates depend on."""
    return hash_of(
        "raced",
        source.key,
        graph.key,
        [(candidate.name, candidate.option.key, digest_plan(candidate.plan)) for candidate in candidates],
        this_machine().model_dump(),
        environment_digest(),
    )


def time_candidates(
    candidates: Sequence[EngineCandidate], source: Source, task: Task, steps: Steps
) -> dict[str, float]:
    """Measure the mean speed-up of each candidate over the original, by name."""
    with steps.step("time the candidates", len(TRIAL_BATCHES)) as step, ExitStack() as stack:
        sessions = {each.name: stack.enter_context(each.option.open(each.model, 1)) for each in candidates}
        sessions = {ORIGINAL: stack.enter_context(source.open(1)), **sessions}
        times = benchmark_sessions(
            sessions,
            task,
            baseline=ORIGINAL,
            batches=TRIAL_BATCHES,
            threads=1,
            step=step,
            # Processor time, so that other programs on the machine do not influence the choice. That of a GPU is not
            # among it.
            clock=time.perf_counter if any(each.option.on_gpu for each in candidates) else time.process_time,
        )
        speedups = {name: mean_speedup([each for each in times if each.engine == name]) for name in sessions}
        step.note = "; ".join(f"{name}: {speed:.2f} x" for name, speed in speedups.items() if name != ORIGINAL)
        return speedups


def measure_chosen(
    chosen: EngineCandidate, source: Source, task: Task, steps: Steps, seconds: Mapping[str, float]
) -> Measurements:
    """Time the chosen candidate and the original, and make the content of measured.json; without timings where the
    engine is not on this machine. seconds: duration of each stage, by the key of its record."""
    is_here = not chosen.option.reference
    times, writing = time_chosen(chosen, source, task, steps) if is_here else ((), ())
    timings = [time for time in times if time.engine == chosen.option.name]
    return Measurements(
        machine=this_machine(),
        timings=times,
        writing=writing,
        # From the faster quartile of the runs: throughput is flat around the knee, and other load shifts medians.
        knee=find_knee({time.batch: time.quartiles[0] for time in timings}) if timings else DEFAULT_KNEE,
        stages=dict(steps.seconds),
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        original_size=source.size,
        arithmetic=dict(chosen.arithmetic),
        products=chosen.products,
        seconds=dict(seconds),
    )


def time_chosen(
    chosen: EngineCandidate, source: Source, task: Task, steps: Steps
) -> tuple[tuple[Timing, ...], tuple[WritingSpeed, ...]]:
    """Time the chosen candidate and the original at every batch size, latency and throughput, and how fast they
    write."""
    with steps.step("measure latency and throughput", len(BATCHES)) as step, ExitStack() as stack:
        sessions = {ORIGINAL: stack.enter_context(source.open(1))}
        sessions[chosen.option.name] = stack.enter_context(chosen.option.open(chosen.model, 1))
        times = benchmark_sessions(sessions, task, baseline=ORIGINAL, batches=BATCHES, threads=1, step=step)
        step.note = f"{max(time.speedup for time in times if time.engine != ORIGINAL):.2f} x at best"
        return tuple(times), tuple(measure_writing(sessions, task))
