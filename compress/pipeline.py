"""The pipeline of `laconic compress`: apply the stages of a recipe, then write an artifact or a smaller checkpoint.

The result of each stage that changes the module is cached, and its sizes and fidelity are recorded.
"""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint_report import (
    WrittenCheckpoint,
    compare_with_original,
    find_missed_by_checkpoint,
    write_report,
)
from export.lineage import Lineage, open_lineage, summarize_quality
from export.pipeline import Result, write_artifact
from export.sources import as_checkpoint_source
from laconic.arrays import Array, Arrays
from laconic.artifacts.artifact import check_destination
from laconic.artifacts.ledger import DIVERGENCE, format_divergence, make_ledger
from laconic.artifacts.record import Record
from laconic.artifacts.verdict import Comparison
from laconic.cache import Cache
from laconic.errors import RecipeError
from laconic.files import replace_folder
from laconic.hardware import cores, this_machine
from laconic.models.checkpoint import BUILDABLE, Checkpoint, check_free
from laconic.models.footprint import measure_footprint
from laconic.models.torch_session import TorchSession
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import TestPart
from laconic.recipes.stage import Property, Stage, TorchContext, TorchStage, find_made_properties
from laconic.recipes.stage_order import PROPERTY_DESCRIPTIONS
from laconic.runtimes.predict import predict
from laconic.tasks.fidelity import measure_divergence, measure_fidelity
from laconic.units import format_bytes, format_count, format_fidelity
from train.parallel.ranks import Ranks
from train.precision import settle_precision
from train.settings import Training

KEPT, TIME = "checkpoint", "seconds.json"


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
class CompressedCheckpoint(WrittenCheckpoint):
    """A compressed checkpoint that was written."""

    checkpoint: Checkpoint


def compress_checkpoint(
    recipe: Recipe, destination: Path, *, trust: bool = False, steps: Steps | None = None, cache: Cache | None = None
) -> CompressedCheckpoint:
    """Apply the stages of a recipe to the module, and write the checkpoint to `destination` atomically, with a
    report of sizes and fidelity after each stage.

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
            comparison = compare_checkpoint(lineage)
            step.note = f"fidelity {comparison.figures['fidelity']:.6g}"
        folder = lineage.job.folder / "checkpoint"
        checkpoint.save(folder)
        report = describe_checkpoint(lineage, checkpoint, comparison)
        write_report(report, recipe, folder)
        replace_folder(folder, destination)
    missed = tuple(find_missed_by_checkpoint(comparison, report, recipe.goal))
    return CompressedCheckpoint(destination, report, missed, checkpoint)


def compare_checkpoint(lineage: Lineage) -> Comparison:
    """Compare the outputs of the checkpoint that the stages made with the original's, on the test samples."""
    judge, task = lineage.job.samples.judge, lineage.model.task
    with lineage.model.open(cores()) as session:
        outputs = predict(session, task, judge)
    teacher = f"model after {lineage.teacher}" if lineage.teacher else ""
    return compare_with_original(task, lineage.reference(judge), outputs, judge, lineage.job.recipe, teacher)


def describe_checkpoint(lineage: Lineage, checkpoint: Checkpoint, comparison: Comparison) -> dict[str, Any]:
    """Describe a compressed checkpoint for its report, JSON-ready. comparison: with the original."""
    return {
        "task": checkpoint.task.name,
        "source": Path(lineage.job.recipe.source).resolve().name,
        "stages": [entry.plain() for entry in make_ledger(lineage.describe_source(), lineage.history, lineage.seconds)],
        "drift": comparison.model_dump(mode="json"),
        "licence": checkpoint.licence,
        "machine": this_machine().model_dump(mode="json"),
    }


def apply_stages(lineage: Lineage, stages: Sequence[tuple[str, TorchStage]]) -> None:
    """Apply the named stages in this order, and advance the lineage to each result."""
    if stages and not lineage.source.task.is_trainable:
        raise RecipeError(
            f"{stages[0][0]} changes the module, and models for {lineage.source.task.name} are quantized alone. Leave "
            f"the stage out"
        )
    can_be_kept = lineage.source.description["kind"] in BUILDABLE
    if stages and not can_be_kept:
        lineage.job.steps.warn(
            f"a model from a {lineage.source.description['kind']} cannot be saved, so its stages start again after an "
            f"interruption. Give its weights with a --builder to have results cached"
        )
    for name, stage in settle_stages(lineage, stages):
        for record, what in find_broken(stage, lineage.history):
            lineage.job.steps.warn(f"{name} destroys what {record.stage} made: {PROPERTY_DESCRIPTIONS[what]}")
        run = StageRun(lineage, name, stage)
        checkpoint = run.resume() if can_be_kept else run.apply()
        model = as_checkpoint_source(lineage.model).with_checkpoint(checkpoint)
        lineage.advance(model, name, teaches=stage.teaches)
        lineage.job.steps.report(name, format_record(lineage.history[-1]))


def settle_stages(lineage: Lineage, stages: Sequence[tuple[str, TorchStage]]) -> list[tuple[str, TorchStage]]:
    """Return the stages with the precision of those that train chosen for this device, before the first of them
    runs."""
    job, ranks = lineage.job, Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def settle(stage: TorchStage) -> TorchStage:
        if not isinstance(stage, Training):
            return stage
        module = as_checkpoint_source(lineage.model).checkpoint.module
        return settle_precision(stage, module, ranks, job.cache, job.steps)

    return [(name, settle(stage)) for name, stage in stages]


class StageRun:
    """The application of one stage to the model of a lineage."""

    def __init__(self, lineage: Lineage, name: str, stage: TorchStage) -> None:
        self.lineage = lineage
        self.stage = stage
        self.checkpoint = as_checkpoint_source(lineage.model).checkpoint
        base = lineage.context(name, stage)
        self.context = TorchContext(
            **vars(base),
            original=as_checkpoint_source(lineage.original).checkpoint,
            fidelity=self.fidelity,
            work=lineage.job.cache.folder / f"work-{base.key}",
        )

    def resume(self) -> Checkpoint:
        """Return the stage's result from the cache; it is computed and stored first if it is absent."""
        cache = self.lineage.job.cache

        def fill(folder: Path) -> None:
            start = time.perf_counter()
            self.apply().save(folder / KEPT)
            (folder / TIME).write_text(json.dumps(time.perf_counter() - start))

        with cache.lock(f"stage-{self.context.key}"):
            folder = cache.directory(f"stage-{self.context.key}", fill)
            shutil.rmtree(self.context.work, ignore_errors=True)
        # Loaded even if it was just computed, so that interrupted and uninterrupted runs take the same path.
        checkpoint = Checkpoint.load(folder / KEPT, trust=True)
        self.lineage.seconds[checkpoint.history[-1].key] = float(json.loads((folder / TIME).read_text()))
        return checkpoint

    def apply(self) -> Checkpoint:
        """Apply the stage, and return its result with sizes and fidelity in the last record."""
        torch.manual_seed(self.context.seed)
        checkpoint = self.stage.apply(self.checkpoint, self.context)
        shutil.rmtree(self.context.work, ignore_errors=True)
        record = checkpoint.history[-1]
        figures = {**record.figures, **measure_footprint(checkpoint).figures(), **self.compare(checkpoint)}
        record = record.model_copy(update={"figures": figures})
        return replace(checkpoint, history=(*checkpoint.history[:-1], record))

    def fidelity(self, checkpoint: Checkpoint) -> Array:
        """Measure the fidelity of a checkpoint's outputs to the original's, per validation sample: [samples]."""
        return measure_fidelity(checkpoint.task, *self.answer(checkpoint))

    def compare(self, checkpoint: Checkpoint) -> dict[str, float]:
        """Compare a checkpoint's outputs with the original's, for the history."""
        task, outputs = checkpoint.task, self.answer(checkpoint)
        divergence = float(measure_divergence(task, *outputs).mean())
        return summarize_quality(task, measure_fidelity(task, *outputs), divergence)

    def answer(self, checkpoint: Checkpoint) -> tuple[Arrays, Arrays]:
        """Return the original's outputs for the validation samples, and a checkpoint's: [samples, ...] by name."""
        choose = self.lineage.job.samples.choose
        reference = self.lineage.reference(choose)
        with TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs, cores()) as session:
            return reference, predict(session, checkpoint.task, choose)


def find_broken(stage: Stage, history: Sequence[Record]) -> Iterator[tuple[Record, Property]]:
    """Yield the properties that a stage destroys, each with the record of the stage that made it."""
    for record in history:
        for what in sorted(stage.breaks & find_made_properties(record)):
            yield record, what


def format_record(record: Record) -> str:
    """Format fidelity and sizes after a stage on one line."""
    figures = record.figures
    divergence = f"divergence {format_divergence(figures[DIVERGENCE])}, " if DIVERGENCE in figures else ""
    return (
        f"fidelity {format_fidelity(figures['fidelity'])}, {divergence}"
        f"{format_count(figures['parameters'])} parameters, {format_bytes(figures['bytes'])}, "
        f"{format_count(figures['multiply-adds'])} multiply-adds"
    )
