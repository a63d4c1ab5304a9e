"""What a goal requires, and what an artifact misses of it."""

from collections.abc import Iterator

from laconic.artifacts.artifact import Artifact
from laconic.recipes.recipe import Goal
from laconic.tasks.task import Task, Tolerance
from laconic.units import format_bytes, format_seconds

MARGIN = 0.6
"""The share of the allowed infidelity that may be used up on the samples that choices are made with. Other samples are
farther off: its mean over MiniLM's docstrings moved by up to 6 % between two sets of 250, the worst text by more, and
texts of another kind, descriptions of datasets, were 1.2 to 1.9 times as far off as docstrings."""

WORST = 10
"""How much farther off than the mean the worst sample may be, where a goal speaks of the mean alone: of 400 texts the
worst was four to eight times as far off."""


def required_tolerance(task: Task, goal: Goal) -> Tolerance:
    """The fidelity that the artifact must reach: the goal's, or else the task's own tolerance."""
    if goal.fidelity is None:
        return Tolerance(mean=task.tolerance.mean, worst=task.tolerance.worst if goal.worst is None else goal.worst)
    derived = None if task.tolerance.worst is None else max(1 - WORST * (1 - goal.fidelity), 0.0)
    return Tolerance(mean=goal.fidelity, worst=derived if goal.worst is None else goal.worst)


def tighten(goal: Tolerance, margin: float = MARGIN) -> Tolerance:
    """The stricter goal to choose by, so that unseen samples meet the real one. A worst of 0 requires nothing and
    stays."""
    worst = 1 - margin * (1 - goal.worst) if goal.worst else goal.worst
    return Tolerance(mean=1 - margin * (1 - goal.mean), worst=worst)


def find_missed(artifact: Artifact, goal: Goal) -> Iterator[str]:
    """A sentence for each part of the goal that the artifact misses."""
    if artifact.manifest.verdict:
        yield from artifact.manifest.verdict.failures
    if goal.max_size is not None and artifact.size > goal.max_size:
        yield f"size is {format_bytes(artifact.size)}, the goal is {format_bytes(goal.max_size)}"
    lone = artifact.measured.lone_latency
    if goal.max_latency is not None and lone > goal.max_latency:
        yield f"latency is {format_seconds(lone)}, the goal is {format_seconds(goal.max_latency)}"
