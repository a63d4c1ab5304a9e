"""Benchmark artifacts, and the model that they were made from, in one interleaved run."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from laconic.artifacts.artifact import Artifact, Choice
from laconic.artifacts.manifest import MEASURED
from laconic.artifacts.placement_audit import audit_placement
from laconic.errors import UsageError
from laconic.files import replace_file
from laconic.hardware import this_machine
from laconic.hashing import seal
from laconic.progress import Steps
from laconic.runtimes.runtime import Session
from laconic.timing.benchmark import BATCHES, benchmark_sessions, measure_writing
from laconic.timing.measurements import ORIGINAL, Measurements, Timing, find_knee


def bench(
    paths: Sequence[Path],
    original: Session | None = None,
    *,
    threads: int = 1,
    length: int = 128,
    batches: tuple[int, ...] = (1, 8, 32),
    rounds: int = 15,
    runtime: str | None = None,
) -> list[Timing]:
    """Time artifacts in one interleaved run: in each round every artifact runs once.

    original: a session of the source; speed-ups are relative to it, or else to the first artifact. length: size of the
    dynamic axes, as tokens of a text. batches: in rows. Raises UsageError for artifacts with different inputs.
    """
    artifacts = [Artifact.load(path) for path in paths]
    for artifact in artifacts:
        check_same_inputs(artifacts[0], artifact)
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        if original is not None:
            sessions[ORIGINAL] = original
        for artifact in artifacts:
            choice = artifact.choose(runtime, threads=threads)
            (session,) = artifact.open_placement(choice.engine, choice.placement, threads=threads)
            sessions[make_display_name(artifact, choice, sessions)] = stack.enter_context(session)
        with Steps().step("bench", len(batches)) as step:
            return benchmark_sessions(
                sessions,
                artifacts[0].task(),
                baseline=next(iter(sessions)),
                batches=batches,
                threads=threads,
                step=step,
                length=length,
                rounds=rounds,
                patience=math.inf,
            )


def check_same_inputs(first: Artifact, other: Artifact) -> None:
    """Raise UsageError unless two artifacts have the same inputs."""
    expected, actual = ([(spec.name, spec.dtype, spec.shape) for spec in x.manifest.inputs] for x in (first, other))
    if expected != actual:
        raise UsageError(
            f"{other.path} takes {[spec.describe() for spec in other.manifest.inputs]}, {first.path} takes "
            f"{[spec.describe() for spec in first.manifest.inputs]}: they cannot be timed on the same inputs"
        )


def make_display_name(artifact: Artifact, choice: Choice, taken: dict[str, Session]) -> str:
    """Name an artifact in the timings: with its engine, and with its path if the name is taken."""
    engine = f"{choice.engine.name}, {choice.placement.compute}"
    name = f"{artifact.name} ({engine})"
    return name if name not in taken else f"{artifact.path} ({engine})"


def tune(path: Path, original: Session | None = None, *, threads: int = 1, steps: Steps | None = None) -> Artifact:
    """Race the placements of an artifact on this machine again, time the fastest one at every batch size, and write
    measured.json anew: the timings, the kernels that run, the machine, and the batch size that a server goes up to.

    original: a session of the source, to be timed beside it. threads: per engine. Everything else in the artifact stays
    as it is, the report with the timings of the machine that made it included. Raises MissingPackage if no engine of
    the artifact is on this machine, UnprovenArtifact if it does not give the golden outputs here.
    """
    steps = steps or Steps()
    artifact = Artifact.load(path)
    with steps.step("race the placements") as step:
        choice = artifact.choose(threads=threads, again=True)
        speeds = "; ".join(f"{name}: {speed:.2f} x" for name, speed in choice.speeds.items())
        step.note = f"{choice.engine.name}" + (f" ({speeds})" if speeds else "")
    name = f"{choice.engine.name}, {choice.placement.compute}"
    with steps.step("measure latency and throughput", len(BATCHES)) as step, ExitStack() as stack:
        (session,) = artifact.open_placement(choice.engine, choice.placement, threads=threads)
        sessions = {ORIGINAL: original} if original is not None else {}
        sessions[name] = stack.enter_context(session)
        times = benchmark_sessions(
            sessions, artifact.task(), baseline=next(iter(sessions)), batches=BATCHES, threads=threads, step=step
        )
        writing = measure_writing(sessions, artifact.task())
        latencies = {time.batch: time.quartiles[0] for time in times if time.engine == name}
        kernels = session.kernels()
        step.note = f"best at {find_knee(latencies)} rows"
    updates = {"machine": this_machine(), "timings": tuple(times), "knee": find_knee(latencies)}
    updates["writing"] = tuple(writing)
    updates["products"] = audit_placement(
        artifact.measured.products, artifact.manifest, choice.placement, choice.engine.name, kernels
    )
    if this_machine() != artifact.measured.machine:
        updates["arithmetic"] = {}  # what another machine's kernels computed in
    write_measurements(artifact, artifact.measured.model_copy(update=updates))
    return Artifact.load(path)


def write_measurements(artifact: Artifact, measured: Measurements) -> None:
    """Replace measured.json, atomically."""
    replace_file(artifact.path / MEASURED, seal(measured.model_dump(mode="json")))
