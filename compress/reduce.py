"""From a recipe to a smaller checkpoint, which trains on, is compressed again, and that `laconic.load` opens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.transform import Job, Transformation, opened
from export.evidence import Evidence
from export.report.report import render_checkpoint
from laconic import registry
from laconic.artifacts.artifact import REPORT, put
from laconic.artifacts.ledger import JSON, make_ledger
from laconic.artifacts.verdict import Comparison
from laconic.cache import Cache
from laconic.finetune.finetune import check_free
from laconic.hardware import cores, this_machine
from laconic.models.checkpoint import Checkpoint
from laconic.progress import Steps
from laconic.recipes.goal import wanted
from laconic.recipes.recipe import Goal, Recipe
from laconic.recipes.stage import TorchStage
from laconic.runtimes.predict import answers
from laconic.runtimes.torch import TorchSession
from laconic.units import format_bytes


@dataclass(frozen=True)
class Reduced:
    """A checkpoint, where it lies, what `report.json` in it says, and a sentence for each part of the goal that it
    misses."""

    checkpoint: Checkpoint
    path: Path
    report: dict[str, Any]
    missed: tuple[str, ...]


def reduce(
    recipe: Recipe, destination: Path, *, trust: bool = False, steps: Steps | None = None, cache: Cache | None = None
) -> Reduced:
    """Do what the recipe says to the module, and write the checkpoint to `destination`, whole or not at all, with a
    report of what each stage gained and cost.

    An interrupted run goes on from the last stage that was done, or from within one that trains. Raises a LaconicError
    for a source, data or a recipe that is wrong, or for a source that cannot be saved as a checkpoint.
    """
    steps, cache = steps or Steps(), cache or Cache()
    check_free(destination.resolve())
    with opened(recipe, destination, steps, cache, trust=trust) as (source, job):
        assert source.checkpoint is not None  # no stage that changes a module is legal on a graph
        source.checkpoint.check_buildable()
        line = Transformation(source, job)
        stages = zip((step.name for step in recipe.stages), recipe.build(), strict=True)
        line.pass_through([(name, stage) for name, stage in stages if isinstance(stage, TorchStage)])
        checkpoint = line.model.checkpoint
        assert checkpoint is not None
        with steps.step("compare with the original") as step:
            drift = compared(line, job, checkpoint)
            step.note = f"fidelity {drift.figures['fidelity']:.6g}"
        folder = job.folder / "checkpoint"
        checkpoint.save(folder)
        report = described(recipe, line, checkpoint, drift)
        (folder / JSON).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        (folder / REPORT).write_text(render_checkpoint(report, recipe), encoding="utf-8")
        put(folder, destination)
    return Reduced(checkpoint, destination, report, tuple(missed(drift, report, recipe.goal)))


def compared(line: Transformation, job: Job, checkpoint: Checkpoint) -> Comparison:
    """The checkpoint's answers with the original's, on samples that nothing has looked at."""
    judge, task, goal = job.samples.judge, line.source.task, job.recipe.goal
    with TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs, cores()) as session:
        found = answers(session, task, judge)
    evidence = Evidence(
        capture_error=None,
        original=line.reference(judge),
        artifact=found,
        labels=judge.labels,
        plain={},
        alone={},
        together={},
        made_up=not job.samples.fingerprints,
    )
    drift: Comparison = registry.load("export.validate:compare_with_original")(
        evidence, task, wanted(task, goal), goal, job.recipe.seed
    )
    # The task's own tolerance is for what is served; a checkpoint is held to what was asked for alone.
    asked = {"fidelity": goal.fidelity, "fidelity_worst": goal.worst, "metric_change": goal.max_drop}
    required = {name: least for name, least in drift.required.items() if asked.get(name) is not None}
    against = f"model after {line.teacher}" if line.teacher else drift.against
    return drift.model_copy(update={"subject": "checkpoint", "against": against, "required": required})


def described(recipe: Recipe, line: Transformation, checkpoint: Checkpoint, drift: Comparison) -> dict[str, Any]:
    """What the report says, JSON-ready."""
    return {
        "task": checkpoint.task.name,
        "source": Path(recipe.source).resolve().name,
        "stages": [entry.plain() for entry in make_ledger(line.description(), line.history, line.seconds)],
        "drift": drift.model_dump(mode="json"),
        "licence": checkpoint.licence,
        "machine": this_machine().model_dump(mode="json"),
    }


def missed(drift: Comparison, report: dict[str, Any], goal: Goal) -> Iterator[str]:
    """A sentence for each part of the goal that a checkpoint misses."""
    yield from drift.failures
    size = report["stages"][-1]["figures"]["bytes"]
    if goal.max_size is not None and size > goal.max_size:
        yield f"size is {format_bytes(size)}, the goal is {format_bytes(goal.max_size)}"
