"""The tolerance that a goal requires, and the parts of a goal that an artifact does not meet."""

from collections.abc import Iterator

from laconic.artifacts.artifact import Artifact
from laconic.recipes.recipe import Goal
from laconic.tasks.task import Task, Tolerance
from laconic.units import format_bytes, format_seconds

MARGIN = 0.6
"""The share of the allowed infidelity (1 - fidelity) that may be spent on the validation samples, since other samples
differ more: the mean infidelity of MiniLM on docstrings varied by up to 6 % between two sets of 250, that of the worst
text by more, and for texts of another kind, descriptions of datasets, it was 1.2 to 1.9 times that for docstrings."""

WORST = 10
"""How many times the mean infidelity the worst sample may have, if a goal gives the mean alone: the worst of 400 texts
had four to eight times the mean."""


def required_tolerance(task: Task, goal: Goal) -> Tolerance:
    """Return the fidelity that the artifact must reach: the goal's, or else the task's default tolerance."""
    if goal.fidelity is None:
        return Tolerance(mean=task.tolerance.mean, worst=task.tolerance.worst if goal.worst is None else goal.worst)
    derived = None if task.tolerance.worst is None else max(1 - WORST * (1 - goal.fidelity), 0.0)
    return Tolerance(mean=goal.fidelity, worst=derived if goal.worst is None else goal.worst)


def tighten(goal: Tolerance, margin: float = MARGIN) -> Tolerance:
    """Return a stricter tolerance for choices made on validation samples, so that unseen samples meet the real one. A
    worst of 0 requires nothing and is kept."""
    worst = 1 - margin * (1 - goal.worst) if goal.worst else goal.worst
    return Tolerance(mean=1 - margin * (1 - goal.mean), worst=worst)


def find_missed(artifact: Artifact, goal: Goal) -> Iterator[str]:
    """Yield a sentence for each part of the goal that the artifact does not meet."""
    if artifact.manifest.verdict:
        yield from artifact.manifest.verdict.failures
    if goal.max_size is not None and artifact.size > goal.max_size:
        yield f"size is {format_bytes(artifact.size)}, the goal is {format_bytes(goal.max_size)}"
    if goal.max_latency is None:
        return
    lone = artifact.measured.lone_latency
    if lone is None:
        yield f"latency was not measured, the goal is {format_seconds(goal.max_latency)}: the engine is not here"
    elif lone > goal.max_latency:
        yield f"latency is {format_seconds(lone)}, the goal is {format_seconds(goal.max_latency)}"
