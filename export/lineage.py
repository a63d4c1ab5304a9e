"""The lineage of a model during a run, from the source to the artifact."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from export.formats.module_origin import ModuleOrigin
from export.reference_texts import write_reference_texts
from export.sources import open_source
from laconic.arrays import Array, Arrays
from laconic.artifacts.ledger import DIVERGENCE
from laconic.artifacts.record import Record
from laconic.cache import Cache, open_scratch_folder
from laconic.data.dataset import Dataset, Samples
from laconic.hardware import cores
from laconic.hashing import environment_digest, hash_of
from laconic.models.footprint import measure_footprint
from laconic.models.source import CheckpointSource, GraphSource, Source
from laconic.progress import Step, Steps
from laconic.recipes.job import Job
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import TestPart, describe_uncertainty, split_samples
from laconic.recipes.stage import Context, Stage, describe_stage
from laconic.registry import trust_addresses
from laconic.runtimes.predict import predict
from laconic.tasks.answer_comparison import AnswerComparison
from laconic.tasks.null_answers import NULL


class Lineage:
    """The model of a run, with its source and its history.

    source: the model that the recipe names. model: the model after the stages so far. original: the model whose outputs
    are the reference: the source, or the result of the last stage that changes outputs on purpose (fine-tuning).
    teacher: that stage's name, or "". seconds: duration of each stage, by the key of its record.
    """

    def __init__(self, source: Source, job: Job) -> None:
        self.source = self.model = self.original = source
        self.job = job
        self.teacher = ""
        self.history: list[Record] = list(source.checkpoint.history) if isinstance(source, CheckpointSource) else []
        self.seconds: dict[str, float] = {}

    def advance(self, model: CheckpointSource, name: str, *, teaches: bool) -> None:
        """Replace the model by the result of the stage `name`. teaches: whether that becomes the reference."""
        self.model, self.history = model, list(model.checkpoint.history)
        if teaches:
            self.original, self.teacher = model, name

    def drop_cache(self) -> None:
        """Go on with the model without a cache of keys and values, for engines that do not write."""
        if isinstance(self.model, CheckpointSource):
            checkpoint = self.model.checkpoint
            self.model = self.model.with_checkpoint(checkpoint.with_task(checkpoint.task.with_cache(None)))

    def reference(self, dataset: Dataset, step: Step | None = None) -> Arrays:
        """Return the original's outputs for these samples, [samples, ...] by name; they are cached."""
        key = hash_of("original", self.original.key, dataset.fingerprint, environment_digest())

        def compute() -> Arrays:
            with self.original.open(cores()) as session:
                task = self.original.task
                answers = predict(session, task, dataset, step)
                if (others := task.make_null_samples(dataset.samples.sources)) is None:
                    return answers
                nulls = predict(session, task, replace(dataset, samples=Samples(others, task.parse)))
                return answers | {f"{NULL}{name}": array for name, array in nulls.items()}

        return self.job.cache.arrays(f"answers-{key}", compute)

    def context(self, name: str, stage: Stage) -> Context:
        """Make the context of a stage, with a key of everything that its result depends on."""
        samples, seed = self.job.samples, self.job.recipe.seed
        data = {role: getattr(samples, role).fingerprint for role in ("train", "calibrate", "choose")}
        described = describe_stage(name, stage)
        key = hash_of(described, self.model.key, self.original.key, data, seed, environment_digest())
        return Context(
            task=self.model.task,
            key=key,
            seed=seed,
            folder=self.job.folder,
            cache=self.job.cache,
            steps=self.job.steps,
            train=samples.train,
            calibrate=samples.calibrate,
            choose=samples.choose,
        )

    @property
    def origin(self) -> ModuleOrigin:
        """What the module of the model is built from, without its weights."""
        return ModuleOrigin(self.source.description, tuple(self.history))

    def describe_source(self) -> dict[str, Any]:
        """Describe the source, JSON-ready: how to rebuild it, its figures, and the length of its own history."""
        if not isinstance(self.source, CheckpointSource):
            return {**self.source.description, "figures": {"bytes": self.source.size}, "earlier": 0}
        checkpoint = self.source.checkpoint
        figures = measure_footprint(checkpoint).figures()
        return {**self.source.description, "figures": figures, "earlier": len(checkpoint.history)}


@contextmanager
def open_lineage(
    recipe: Recipe, destination: Path, steps: Steps, cache: Cache, *, trust: bool, part: TestPart = "all"
) -> Iterator[Lineage]:
    """Open the source and the samples of a recipe, with a scratch folder beside the destination, on the same disk, that
    is removed at the end. trust: whether the source may execute code, and the recipe name code, also in the body. part:
    of the test samples, for the verdict."""
    with trust_addresses(trust), open_scratch_folder(destination) as folder:
        with steps.step("load the source and the samples") as step:
            source = open_source(recipe, cache, trust=trust, samples=recipe.data.calibrate)
            samples = split_samples(recipe, source.task, part)
            step.note = f"{source.task.name}, {source.size / 1e6:.1f} MB, {len(samples.judge)} test samples"
            for dataset in (samples.train, samples.calibrate, samples.choose, samples.judge):
                source.task.check_samples(dataset.samples)
        samples = write_reference_texts(samples, source, cache, steps, recipe.seed)
        if source.task.generation and (difference := source.task.generation.describe_difference()):
            steps.warn(difference)
        for note in source.notes if isinstance(source, GraphSource) else ():
            steps.warn(note)
        for note in samples.left_out:
            steps.warn(note)
        if samples.copies:
            steps.warn(
                f"{samples.copies} samples are copies of others, or differ by case, spaces or a letter. Each group of "
                f"copies counts as one sample, and is not split"
            )
        if samples.fingerprints and (few := describe_uncertainty(samples.judge)):
            steps.warn(few)
        if source.task.max_length and (cut := source.task.count_cut(samples.judge.samples)):
            steps.warn(
                f"{cut} of {len(samples.judge)} test samples are longer than the {source.task.max_length} tokens that "
                f"the model takes: their ends are cut off"
            )
        yield Lineage(source, Job(recipe, samples, folder, steps, cache))


def summarize_quality(task: AnswerComparison, fidelity: Array, divergence: float) -> dict[str, float]:
    """Summarize how like the original's the outputs are, for the history: the mean and the lowest fidelity, and of
    models that write the divergence. fidelity: [samples]. divergence: the mean over samples."""
    figures = {"fidelity": float(fidelity.mean()), "fidelity worst": float(fidelity.min())}
    figures |= {DIVERGENCE: divergence} if task.measures_perplexity else {}
    return {name: round(value, 6) for name, value in figures.items()}
