"""Benchmark artifacts, and the model that they were made from, in one interleaved run."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from laconic.artifacts.artifact import Artifact, Choice
from laconic.errors import UsageError
from laconic.progress import Steps
from laconic.runtimes.runtime import Session
from laconic.timing.benchmark import benchmark_sessions
from laconic.timing.measurements import ORIGINAL, Timing


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
