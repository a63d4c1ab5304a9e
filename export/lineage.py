"""A run over one source: what its steps share, and the model on its way from the source to the artifact."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.sources import open_source
from laconic.artifacts.record import Record
from laconic.cache import Cache, open_scratch_folder
from laconic.data.dataset import Dataset
from laconic.hardware import cores
from laconic.hashing import code_version, hash_of
from laconic.models.footprint import footprint
from laconic.models.source import CheckpointSource, Source
from laconic.progress import Step, Steps
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import Samples, gather
from laconic.recipes.stage import Context, Stage, dump_settings
from laconic.runtimes.predict import predict
from laconic.tensor import Array, Arrays


@dataclass(frozen=True)
class Job:
    """What every step of a run works with. folder: scratch, removed when the run ends."""

    recipe: Recipe
    samples: Samples
    folder: Path
    steps: Steps
    cache: Cache


class Lineage:
    """The model of a run: where it came from, what it is now, and what has been done to it.

    source: as it came. model: as it is now. original: the model whose outputs are the reference: the source, or what
    the last stage that changes the outputs on purpose (fine-tuning) made of it. teacher: that stage's name, or "".
    seconds: of each stage, by the key of its record.
    """

    def __init__(self, source: Source, job: Job) -> None:
        self.source = self.model = self.original = source
        self.job = job
        self.teacher = ""
        self.history: list[Record] = list(source.checkpoint.history) if isinstance(source, CheckpointSource) else []
        self.seconds: dict[str, float] = {}

    def advance(self, model: CheckpointSource, name: str, *, teaches: bool) -> None:
        """Go on with what the stage `name` made of the model. teaches: whether it is the reference from here on."""
        self.model, self.history = model, list(model.checkpoint.history)
        if teaches:
            self.original, self.teacher = model, name

    def reference(self, dataset: Dataset, step: Step | None = None) -> Arrays:
        """The original's outputs for these samples, from the cache where they are there."""
        key = hash_of("original", self.original.key, dataset.fingerprint, code_version())

        def compute() -> Arrays:
            with self.original.open(cores()) as session:
                return predict(session, self.source.task, dataset, step)

        return self.job.cache.arrays(f"answers-{key}", compute)

    def context(self, name: str, stage: Stage) -> Context:
        """What any stage may use. Its key holds all that its result depends upon."""
        samples, seed = self.job.samples, self.job.recipe.seed
        data = {role: getattr(samples, role).fingerprint for role in ("train", "calibrate", "choose")}
        key = hash_of(name, dump_settings(stage), self.model.key, self.original.key, data, seed, code_version())
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

    def describe_source(self) -> dict[str, Any]:
        """The source, JSON-ready: how to build it again, what it takes, and how much history it came with."""
        if not isinstance(self.source, CheckpointSource):
            return {**self.source.description, "figures": {"bytes": self.source.size}, "earlier": 0}
        checkpoint = self.source.checkpoint
        figures = footprint(checkpoint).figures()
        return {**self.source.description, "figures": figures, "earlier": len(checkpoint.history)}


@contextmanager
def open_lineage(recipe: Recipe, destination: Path, steps: Steps, cache: Cache, *, trust: bool) -> Iterator[Lineage]:
    """Open the source and the samples that a recipe names, with a scratch folder beside the destination, on the same
    disk, that is removed afterwards."""
    with open_scratch_folder(destination) as folder:
        with steps.step("load the source and the samples") as step:
            source = open_source(recipe, cache, trust=trust)
            samples = gather(recipe, source.task)
            step.note = f"{source.task.name}, {source.size / 1e6:.1f} MB, {len(samples.judge)} samples to judge by"
        yield Lineage(source, Job(recipe, samples, folder, steps, cache))


def summarize_fidelity(fidelity: Array) -> dict[str, float]:
    """The mean and the worst of a fidelity per sample, as they stand in the history."""
    return {"fidelity": round(float(fidelity.mean()), 6), "fidelity worst": round(float(fidelity.min()), 6)}
