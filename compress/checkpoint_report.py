"""What is said of a compressed checkpoint: the comparison with the original, and the report beside it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.report.report import render_checkpoint
from export.validation.drift import compare_outputs
from export.validation.missed import describe_doubts
from laconic.arrays import Arrays
from laconic.artifacts.ledger import JSON
from laconic.artifacts.manifest import REPORT
from laconic.artifacts.verdict import Comparison
from laconic.data.dataset import Dataset
from laconic.recipes.goal import Goal, find_max_drop, required_tolerance
from laconic.recipes.recipe import Recipe
from laconic.tasks.task import Task


@dataclass(frozen=True)
class WrittenCheckpoint:
    """The folder of a compressed checkpoint, the content of its report.json, and a sentence for each part of the goal
    that it does not meet."""

    path: Path
    report: dict[str, Any]
    missed: tuple[str, ...]


def compare_with_original(
    task: Task, reference: Arrays, outputs: Arrays, judge: Dataset, recipe: Recipe, teacher: str = ""
) -> Comparison:
    """Compare the outputs of a checkpoint with the original's, on the test samples. teacher: what the outputs of the
    reference are of, where it is not the original."""
    goal = recipe.goal
    comparison = compare_outputs(
        task,
        reference,
        outputs,
        task.label_samples(judge.samples, judge.labels),
        tolerance=required_tolerance(task, goal),
        max_drop=find_max_drop(goal),
        per_row=judge.per_row,
        seed=recipe.seed,
    )
    # The task's default tolerance is for artifacts; a checkpoint must meet only what the goal states.
    asked = {"fidelity": goal.fidelity, "fidelity_worst": goal.worst, "metric_change": goal.max_drop}
    required = {name: least for name, least in comparison.required.items() if asked.get(name) is not None}
    against = teacher or comparison.against
    return comparison.model_copy(update={"subject": "checkpoint", "against": against, "required": required})


def find_missed_by_checkpoint(comparison: Comparison, report: dict[str, Any], goal: Goal) -> Iterator[str]:
    """Yield a sentence for each part of the goal that a checkpoint does not meet."""
    yield from comparison.failures
    yield from describe_doubts(comparison, goal)
    size = report["stages"][-1]["figures"]["bytes"]
    if goal.max_size is not None and size > goal.max_size:
        yield f"size is {size / 1e6:.1f} MB, the goal is {goal.max_size / 1e6:.1f} MB"


def write_report(report: dict[str, Any], recipe: Recipe, folder: Path) -> None:
    """Write the report for programs and the one for readers into the folder of a checkpoint."""
    (folder / JSON).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (folder / REPORT).write_text(render_checkpoint(report, recipe), encoding="utf-8")
