"""The pipeline of `laconic compress`: apply the stages of a recipe, then write an artifact or a smaller checkpoint."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.transform import apply_stages
from export.lineage import Lineage, open_lineage
from export.pipeline import Result, write_artifact
from export.report.report import render_checkpoint
from export.sources import as_checkpoint_source
from export.validation.drift import compare_outputs
from export.validation.missed import describe_doubts
from laconic.artifacts.artifact import check_destination
from laconic.artifacts.ledger import JSON, make_ledger
from laconic.artifacts.manifest import REPORT
from laconic.artifacts.verdict import Comparison
from laconic.cache import Cache
from laconic.files import replace_folder
from laconic.hardware import cores, this_machine
from laconic.models.checkpoint import Checkpoint, check_free
from laconic.progress import Steps
from laconic.recipes.goal import Goal, find_max_drop, required_tolerance
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import TestPart
from laconic.recipes.stage import TorchStage
from laconic.runtimes.predict import predict


def compress(
    recipe: Recipe,
    destination: Path,
    *,
    trust: bool = False,
    steps: Steps | None = None,
    cache: Cache | None = None,
    part: TestPart = "all",
) -> Result:
    """Apply the stages of a recipe, and write the artifact to `destination` atomically.

    part: of the test samples, for the verdict. An interrupted run resumes from the cache. If the goal is not met, the
    best artifact is written and the result lists the unmet parts. Raises a LaconicError for an invalid source, data or
    recipe.
    """
    check_destination(destination)
    with open_lineage(recipe, destination, steps or Steps(), cache or Cache(), trust=trust, part=part) as lineage:
        apply_stages(lineage, torch_stages(recipe))
        return write_artifact(lineage, destination)


def torch_stages(recipe: Recipe) -> list[tuple[str, TorchStage]]:
    """List the stages of a recipe that change the module, with their names."""
    stages = zip((step.name for step in recipe.stages), recipe.make_stages(), strict=True)
    return [(name, stage) for name, stage in stages if isinstance(stage, TorchStage)]


@dataclass(frozen=True)
class CompressedCheckpoint:
    """A compressed checkpoint, its folder, the content of its report.json, and a sentence for each part of the goal
    that it does not meet."""

    checkpoint: Checkpoint
    path: Path
    report: dict[str, Any]
    missed: tuple[str, ...]


def compress_checkpoint(
    recipe: Recipe, destination: Path, *, trust: bool = False, steps: Steps | None = None, cache: Cache | None = None
) -> CompressedCheckpoint:
    """Apply the stages of a recipe to the module, and write the checkpoint to `destination` atomically, with a report
    of sizes and fidelity after each stage.

    An interrupted run resumes from the last finished stage, or from a training snapshot within one. Raises a
    LaconicError for an invalid source, data or recipe, or for a source that cannot be saved as a checkpoint.
    """
    check_free(destination.resolve())
    steps = steps or Steps()
    with open_lineage(recipe, destination, steps, cache or Cache(), trust=trust) as lineage:
        as_checkpoint_source(lineage.source).checkpoint.check_buildable()
        apply_stages(lineage, torch_stages(recipe))
        checkpoint = as_checkpoint_source(lineage.model).checkpoint
        with steps.step("compare with the original") as step:
            found = compare_checkpoint(lineage)
            step.note = f"fidelity {found.figures['fidelity']:.6g}"
        folder = lineage.job.folder / "checkpoint"
        checkpoint.save(folder)
        report = describe_checkpoint(lineage, checkpoint, found)
        (folder / JSON).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        (folder / REPORT).write_text(render_checkpoint(report, recipe), encoding="utf-8")
        replace_folder(folder, destination)
    return CompressedCheckpoint(
        checkpoint, destination, report, tuple(find_missed_by_checkpoint(found, report, recipe.goal))
    )


def compare_checkpoint(lineage: Lineage) -> Comparison:
    """Compare the outputs of the checkpoint that the stages made with the original's, on the test samples."""
    job = lineage.job
    judge, task, goal = job.samples.judge, lineage.source.task, job.recipe.goal
    with lineage.model.open(cores()) as session:
        found = predict(session, task, judge)
    comparison = compare_outputs(
        task,
        lineage.reference(judge),
        found,
        judge.labels,
        tolerance=required_tolerance(task, goal),
        max_drop=find_max_drop(goal),
        per_row=judge.per_row,
        seed=job.recipe.seed,
    )
    # The task's default tolerance is for artifacts; a checkpoint must meet only what the goal states.
    asked = {"fidelity": goal.fidelity, "fidelity_worst": goal.worst, "metric_change": goal.max_drop}
    required = {name: least for name, least in comparison.required.items() if asked.get(name) is not None}
    against = f"model after {lineage.teacher}" if lineage.teacher else comparison.against
    return comparison.model_copy(update={"subject": "checkpoint", "against": against, "required": required})


def describe_checkpoint(lineage: Lineage, checkpoint: Checkpoint, found: Comparison) -> dict[str, Any]:
    """Describe a compressed checkpoint for its report, JSON-ready. found: its comparison with the original."""
    return {
        "task": checkpoint.task.name,
        "source": Path(lineage.job.recipe.source).resolve().name,
        "stages": [entry.plain() for entry in make_ledger(lineage.describe_source(), lineage.history, lineage.seconds)],
        "drift": found.model_dump(mode="json"),
        "licence": checkpoint.licence,
        "machine": this_machine().model_dump(mode="json"),
    }


def find_missed_by_checkpoint(found: Comparison, report: dict[str, Any], goal: Goal) -> Iterator[str]:
    """Yield a sentence for each part of the goal that a checkpoint does not meet."""
    yield from found.failures
    yield from describe_doubts(found, goal)
    size = report["stages"][-1]["figures"]["bytes"]
    if goal.max_size is not None and size > goal.max_size:
        yield f"size is {size / 1e6:.1f} MB, the goal is {goal.max_size / 1e6:.1f} MB"
