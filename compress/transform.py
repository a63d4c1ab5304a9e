"""A source on its way through the stages that change its module: each result is kept, each gain and cost counted."""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from laconic import registry
from laconic.artifacts.record import Record
from laconic.cache import Cache, scratch
from laconic.data.dataset import Dataset
from laconic.hardware import cores
from laconic.hashing import code_version, hash_of
from laconic.models.checkpoint import BUILD, Checkpoint
from laconic.models.footprint import footprint
from laconic.models.source import Source, open_source
from laconic.progress import Step, Steps
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import Samples, gather
from laconic.recipes.stage import Context, Property, Stage, TorchContext, TorchStage, describe
from laconic.recipes.stage_order import MEANINGS
from laconic.runtimes.predict import answers
from laconic.runtimes.torch import TorchSession
from laconic.tensor import Array, Arrays
from laconic.units import format_bytes, format_count, format_fidelity

KEPT, TIME = "checkpoint", "seconds.json"


@dataclass(frozen=True)
class Job:
    """What every step of a run works with."""

    recipe: Recipe
    samples: Samples
    folder: Path
    steps: Steps
    cache: Cache


@contextmanager
def opened(
    recipe: Recipe, destination: Path, steps: Steps, cache: Cache, *, trust: bool
) -> Iterator[tuple[Source, Job]]:
    """What a recipe names, and a scratch folder beside the destination, on the same disk, that is gone afterwards."""
    with scratch(destination) as folder:
        with steps.step("load the source and the samples") as step:
            source = open_source(recipe, cache, trust=trust)
            samples = gather(recipe, source.task)
            step.note = f"{source.task.name}, {format_bytes(source.size)}, {len(samples.judge)} samples to judge by"
        yield source, Job(recipe, samples, folder, steps, cache)


class Transformation:
    """source: as it came. model: as it is now. original: whose answers are the right ones: the source, or what the last
    stage that teaches made of it. teacher: that stage's name. seconds: of each stage, by the key of its record."""

    def __init__(self, source: Source, job: Job) -> None:
        self.source = self.model = self.original = source
        self.job = job
        self.teacher = ""
        self.history: list[Record] = list(source.checkpoint.history) if source.checkpoint else []
        self.seconds: dict[str, float] = {}

    def pass_through(self, stages: Sequence[tuple[str, TorchStage]]) -> None:
        """Apply the stages, by name, in this order."""
        if stages and not self.can_be_kept:
            self.job.steps.warn(
                f"a model from a {self.source.description['kind']} cannot be saved, so its stages begin anew after an "
                f"interruption. Give its weights with a --builder to have them kept"
            )
        for name, stage in stages:
            for record, what in broken(stage, self.history):
                self.job.steps.warn(f"{name} breaks what {record.stage} made of the source before: {MEANINGS[what]}")
            checkpoint = self.kept(name, stage) if self.can_be_kept else self.applied(name, stage)
            self.model, self.history = self.model.with_checkpoint(checkpoint), list(checkpoint.history)
            self.job.steps.say(name, told(self.history[-1]))
            if stage.teaches:
                self.original, self.teacher = self.model, name

    @property
    def can_be_kept(self) -> bool:
        """Whether a checkpoint of this source can be saved."""
        return self.source.description["kind"] in BUILD

    def kept(self, name: str, stage: TorchStage) -> Checkpoint:
        """What a stage makes of the model, read from the cache, where it is put first unless it is there."""
        context = self.torch_context(name, stage)
        cache = self.job.cache

        def fill(folder: Path) -> None:
            start = time.perf_counter()
            self.applied(name, stage).save(folder / KEPT)
            (folder / TIME).write_text(json.dumps(time.perf_counter() - start))

        with cache.alone(f"stage-{context.key}"):
            folder = cache.directory(f"stage-{context.key}", fill)
            shutil.rmtree(context.work, ignore_errors=True)
        # Read even where it was just made, so that an interrupted run and one that was not go the same way.
        checkpoint = Checkpoint.load(folder / KEPT, trust=True)
        self.seconds[checkpoint.history[-1].key] = float(json.loads((folder / TIME).read_text()))
        return checkpoint

    def applied(self, name: str, stage: TorchStage) -> Checkpoint:
        """What a stage makes of the model, with what it gained and cost in the last record."""
        assert self.model.checkpoint is not None
        context = self.torch_context(name, stage)
        torch.manual_seed(context.seed)
        checkpoint = stage.apply(self.model.checkpoint, context)
        shutil.rmtree(context.work, ignore_errors=True)
        record = checkpoint.history[-1]
        figures = {**record.figures, **footprint(checkpoint).figures(), **faithfulness(self.fidelity(checkpoint))}
        record = record.model_copy(update={"figures": figures})
        return replace(checkpoint, history=(*checkpoint.history[:-1], record))

    def fidelity(self, checkpoint: Checkpoint) -> Array:
        """Of a checkpoint's answers to the original's, per sample of those to choose by."""
        choose = self.job.samples.choose
        reference = self.reference(choose)
        with TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs, cores()) as session:
            return self.source.task.fidelity(reference, answers(session, self.source.task, choose))

    def reference(self, dataset: Dataset, step: Step | None = None) -> Arrays:
        """The original's answers to these samples."""
        key = hash_of("original", self.original.key, dataset.fingerprint, code_version())

        def compute() -> Arrays:
            with self.original.open(cores()) as session:
                return answers(session, self.source.task, dataset, step)

        return self.job.cache.arrays(f"answers-{key}", compute)

    def torch_context(self, name: str, stage: TorchStage) -> TorchContext:
        """What a stage that changes the module may use."""
        assert self.original.checkpoint is not None
        base = self.context(name, stage)
        work = self.job.cache.folder / f"work-{base.key}"
        return TorchContext(**vars(base), original=self.original.checkpoint, fidelity=self.fidelity, work=work)

    def context(self, name: str, stage: Stage) -> Context:
        """What any stage may use. Its key holds all that its result depends upon."""
        samples, seed = self.job.samples, self.job.recipe.seed
        data = {role: getattr(samples, role).fingerprint for role in ("train", "calibrate", "choose")}
        key = hash_of(name, describe(stage), self.model.key, self.original.key, data, seed, code_version())
        return Context(
            task=self.source.task,
            key=key,
            seed=seed,
            folder=self.job.folder,
            cache=self.job.cache,
            steps=self.job.steps,
            train=samples.train,
            calibrate=samples.calibrate,
            choose=samples.choose,
        )

    def description(self) -> dict[str, object]:
        """The source, JSON-ready: how to build it again, what it takes, and how much history it came with."""
        checkpoint = self.source.checkpoint
        figures = footprint(checkpoint).figures() if checkpoint else {"bytes": self.source.size}
        return {
            **self.source.description,
            "figures": figures,
            "earlier": len(checkpoint.history) if checkpoint else 0,
        }


def broken(stage: Stage, history: Sequence[Record]) -> Iterator[tuple[Record, Property]]:
    """What a stage does not leave in place, and the step that made it."""
    for record in history:
        for what in sorted(stage.breaks & makes(record)):
            yield record, what


def makes(record: Record) -> frozenset[Property]:
    """What a step has given the model that later ones have to leave in place."""
    found: frozenset[Property] = getattr(registry.resolve("stage", record.stage), "makes", frozenset())
    return found


def standing(history: Sequence[Record]) -> tuple[Record, ...]:
    """The steps but those of which a later one has broken what they made."""
    later = [
        frozenset[Property]().union(
            *(getattr(registry.resolve("stage", each.stage), "breaks", ()) for each in history[place + 1 :])
        )
        for place in range(len(history))
    ]
    return tuple(record for record, breaks in zip(history, later, strict=True) if not makes(record) & breaks)


def faithfulness(fidelity: Array) -> dict[str, float]:
    """The mean and the worst, as they stand in the history."""
    return {"fidelity": round(float(fidelity.mean()), 6), "fidelity worst": round(float(fidelity.min()), 6)}


def told(record: Record) -> str:
    """What a stage gained and cost, on one line."""
    figures = record.figures
    return (
        f"fidelity {format_fidelity(figures['fidelity'])}, {format_count(figures['parameters'])} parameters, "
        f"{format_bytes(figures['bytes'])}, {format_count(figures['multiply-adds'])} multiply-adds"
    )
