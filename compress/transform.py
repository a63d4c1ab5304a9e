"""Application of the stages that change the module: each result is cached, and its sizes and fidelity are recorded."""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from export.lineage import Lineage, summarize_fidelity
from export.sources import as_checkpoint_source
from laconic.arrays import Array
from laconic.artifacts.record import Record
from laconic.hardware import cores
from laconic.models.checkpoint import BUILDABLE, Checkpoint
from laconic.models.footprint import measure_footprint
from laconic.models.torch_session import TorchSession
from laconic.recipes.stage import Property, Stage, TorchContext, TorchStage, find_made_properties
from laconic.recipes.stage_order import PROPERTY_DESCRIPTIONS
from laconic.runtimes.predict import predict
from laconic.tasks.fidelity import measure_fidelity
from laconic.units import format_bytes, format_count, format_fidelity
from train.parallel.ranks import Ranks
from train.precision import settle_precision
from train.settings import Training

KEPT, TIME = "checkpoint", "seconds.json"


def apply_stages(lineage: Lineage, stages: Sequence[tuple[str, TorchStage]]) -> None:
    """Apply the named stages in this order, and advance the lineage to each result."""
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
    """The stages with the precision of those that train chosen for this device, before the first of them runs."""
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
        fidelity = summarize_fidelity(self.fidelity(checkpoint))
        figures = {**record.figures, **measure_footprint(checkpoint).figures(), **fidelity}
        record = record.model_copy(update={"figures": figures})
        return replace(checkpoint, history=(*checkpoint.history[:-1], record))

    def fidelity(self, checkpoint: Checkpoint) -> Array:
        """Measure the fidelity of a checkpoint's outputs to the original's, per validation sample: [samples]."""
        choose, task = self.lineage.job.samples.choose, self.lineage.source.task
        reference = self.lineage.reference(choose)
        with TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs, cores()) as session:
            return measure_fidelity(task, reference, predict(session, task, choose))


def find_broken(stage: Stage, history: Sequence[Record]) -> Iterator[tuple[Record, Property]]:
    """Yield the properties that a stage destroys, each with the record of the stage that made it."""
    for record in history:
        for what in sorted(stage.breaks & find_made_properties(record)):
            yield record, what


def format_record(record: Record) -> str:
    """Format fidelity and sizes after a stage on one line."""
    figures = record.figures
    return (
        f"fidelity {format_fidelity(figures['fidelity'])}, {format_count(figures['parameters'])} parameters, "
        f"{format_bytes(figures['bytes'])}, {format_count(figures['multiply-adds'])} multiply-adds"
    )
