"""The verdict of a LoRA adapter: an artifact that computes with it beside its weights, against the original with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export.reference_texts import add_answers
from export.sources import as_checkpoint_source, check_original, open_original_source
from export.validation.drift import compare_by_kind, compare_outputs
from export.validation.figures import round_figure
from export.validation.information import SKILL_LEAST, compare_information
from export.validation.missed import find_unlike
from laconic import registry
from laconic.arrays import Array, Arrays
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.golden_tokens import choose_golden_tokens
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.data.near_copies import group_near_copies
from laconic.data.reader import read
from laconic.errors import DataError, SourceError, UsageError
from laconic.hardware import cores
from laconic.models.adapter import Adapter, read_adapter
from laconic.models.pretrained import WritingModel
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import merge_adapter
from laconic.progress import Step, Steps
from laconic.recipes.goal import Goal, find_max_drop, required_tolerance
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import check_labels, find_most
from laconic.runtimes.decoder_file import LOGITS, encoder_of, is_language_model
from laconic.runtimes.decoder_session import DecoderSession
from laconic.runtimes.generator import Generator
from laconic.runtimes.predict import predict
from laconic.runtimes.runtime import Session
from laconic.tasks.decoder_tensors import PROBABILITIES
from laconic.tasks.fidelity import find_broken_answer, measure_fidelity
from laconic.tasks.task import Task

ENGINE = "openvino"
"""The engine that adapters are served by."""
CACHE_BYTES = 1 << 28
"""Of the engine's cache, which whole texts are read without."""
NUMBER = 1
"""What the adapter is loaded under; 0 is the base."""
SUBJECT, AGAINST = "artifact with the adapter", "original with the adapter"


@dataclass(frozen=True)
class AdapterAnswers:
    """Outputs of one model for the same samples, [samples, ...] by name. base: without the adapter. adapted: with
    it."""

    base: Arrays
    adapted: Arrays


class WholeTextDecoder(Session):
    """The decoder that a server writes with, as a session that reads whole texts. adapter: its number; 0 for none."""

    def __init__(self, generator: Generator, adapter: int) -> None:
        self._generator = generator
        self._adapter = adapter

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        return {LOGITS: self._generator.compute_logits(inputs["input_ids"], self._adapter)}


def judge_adapter(
    artifact: Artifact,
    folder: Path,
    data: Path,
    original: Path | None = None,
    *,
    trust: bool = False,
    steps: Steps | None = None,
) -> tuple[Verdict, tuple[str, ...]]:
    """Compare an artifact that computes with an adapter with the original that does. Return the verdict by the goal of
    the artifact's recipe, and a sentence for each part of that goal that is not met.

    folder: of the adapter. data: samples, all of which judge. original: the model that the artifact was made from; by
    default the folder that the adapter names. Raises UsageError for an artifact that no adapter is served beside,
    SourceError for an adapter or an original of another model, DataError for samples on which the adapter changes
    nothing, and what opening either raises.
    """
    adapter = read_adapter(folder)
    trial = AdapterTrial(artifact, folder, adapter, original or adapter.base, trust=trust, steps=steps or Steps())
    with trial.open_generator() as generator:
        generator.load_adapter(NUMBER, folder)  # what is not served is refused before the original is read
        samples, reference = trial.run_original(trial.read_samples(data))
        candidate = trial.run_artifact(generator, samples)
    verdict = trial.compare(reference, candidate, samples)
    return verdict, tuple(find_unlike(verdict, trial.goal))


class AdapterTrial:
    """The steps of the comparison of an artifact and its original, both with an adapter."""

    def __init__(
        self, artifact: Artifact, folder: Path, adapter: Adapter, original: Path, *, trust: bool, steps: Steps
    ) -> None:
        if not original.exists():
            raise SourceError(
                f"{folder} is an adapter of {str(original)!r}, which is not there. Give that model as --original"
            )
        self.artifact = artifact
        self.folder = folder
        self.adapter = adapter
        self.original = original
        self.trust = trust
        self.steps = steps
        self.task: Task = artifact.task()
        self.model = artifact.model_for(ENGINE)
        recipe = artifact.manifest.recipe
        keys = {key: recipe[key] for key in ("goal", "seed") if recipe.get(key)}
        parsed = Recipe.parse({"source": str(original), "stages": []} | keys, where=f"the recipe of {artifact.path}")
        self.goal: Goal = parsed.goal
        self.seed = parsed.seed
        self.tolerance = required_tolerance(self.task, self.goal)

    def open_generator(self) -> Generator:
        """Open the artifact in the engine that serves adapters. Raises UsageError for a model that it serves none
        beside."""
        writes = self.task.generation is not None and is_language_model(self.model)
        if not writes or encoder_of(self.model).is_file():
            raise UsageError(
                f"{self.artifact.path} is no language model that reads text alone. Compress the adapter merged, with a "
                f"verdict of its own: laconic compress {self.folder}"
            )
        placements = self.artifact.manifest.placements
        placement = next((each for each in placements if each.runtime == ENGINE), placements[0])
        generator: Generator = registry.resolve("generator", ENGINE)(
            self.model,
            context=self.task.max_length,
            cache_bytes=CACHE_BYTES,
            threads=cores(),
            compute=placement.compute if placement.runtime == ENGINE else "float32",
            golden=choose_golden_tokens(self.artifact.golden(placement)),
            has_adapters=True,
        )
        return generator

    def read_samples(self, data: Path) -> Dataset:
        """Read the samples: of near copies one, and as many as judge an artifact."""
        dataset = read(data, self.task, sketched=True)
        if dataset.fingerprint in self.artifact.manifest.data.values():
            self.steps.warn(f"{data} holds samples that the artifact was made with. Give others for a fair verdict")
        (dataset,) = group_near_copies(dataset)
        samples = dataset.take(find_most(dataset, self.goal, "all")["judge"], self.seed)
        check_labels(samples, self.task, self.goal.max_drop)
        return samples

    def open_source(self, *, adapted: bool) -> CheckpointSource:
        """Open the original, as it is or with the adapter merged into its weights."""
        source = as_checkpoint_source(open_original_source(self.original, self.artifact.path, trust=self.trust))
        check_original(source, self.original, self.artifact.path, self.artifact.manifest)
        if not adapted:
            return source
        return source.with_checkpoint(merge_adapter(source.checkpoint, self.adapter, self.folder.name))

    def run_original(self, samples: Dataset) -> tuple[Dataset, AdapterAnswers]:
        """Run the original with the adapter, and without. Return the samples, those without an answer with what the
        original writes with the adapter; and the outputs."""
        with self.steps.step("run the original with the adapter") as step:
            source = self.open_source(adapted=True)
            module = source.checkpoint.module
            if isinstance(module, WritingModel) and not all(map(self.task.has_target, samples.samples)):
                samples = add_answers(samples, module, source, Cache(), step)
            adapted = self.predict(source, samples, step)
        if broken := find_broken_answer(adapted):
            raise DataError(
                f"the original with the adapter answers {samples.describe_sample(broken[1])} with NaN or infinity, so "
                f"that nothing can be compared with it. Train the adapter again, or give samples that it can answer"
            )
        with self.steps.step("run the original without it") as step:
            base = self.predict(self.open_source(adapted=False), samples, step)
        return samples, AdapterAnswers(base, adapted)

    def predict(self, source: CheckpointSource, samples: Dataset, step: Step) -> Arrays:
        """Return the outputs of an original."""
        with source.open(cores()) as session:
            return predict(session, self.task, samples, step)

    def run_artifact(self, generator: Generator, samples: Dataset) -> AdapterAnswers:
        """Run the artifact without the adapter, and with it."""
        with self.steps.step("run the artifact without it, and with it") as step:
            sessions = [DecoderSession(WholeTextDecoder(generator, number), self.model) for number in (0, NUMBER)]
            return AdapterAnswers(*(predict(session, self.task, samples, step) for session in sessions))

    def compare(self, reference: AdapterAnswers, candidate: AdapterAnswers, samples: Dataset) -> Verdict:
        """Compare the answers as those of an artifact are, and what the adapter changes in them."""
        labels = self.task.label_samples(samples.samples, samples.labels)
        original, artifact = reference.adapted, candidate.adapted
        whole = compare_outputs(
            self.task,
            original,
            artifact,
            labels,
            tolerance=self.tolerance,
            max_drop=find_max_drop(self.goal),
            per_row=samples.per_row,
            seed=self.seed,
        ).model_copy(update={"subject": SUBJECT, "against": AGAINST})
        kinds = compare_by_kind(measure_fidelity(self.task, original, artifact), samples.kinds, AGAINST)
        information = compare_information(
            self.task, original, artifact, labels, self.tolerance, describe=samples.describe_sample
        )
        effect = self.compare_effect(reference, candidate)
        return Verdict(parity=(), drift=(whole, *kinds), information=(effect, *information))

    def compare_effect(self, reference: AdapterAnswers, candidate: AdapterAnswers) -> Comparison:
        """Compare what the adapter changes in the distributions of the next token: 1 for the same change, 0 for none,
        however little it is beside what compression changes. Raises DataError where it is nothing in the original."""
        moved, missed = measure_effect(reference, candidate)
        if not moved:
            raise DataError(
                f"{self.folder} changes no answer of {self.original} to these samples, so that nothing shows whether "
                f"the artifact keeps what it does. Give samples like those that it was trained on"
            )
        lacking = self.task.fidelity(reference.adapted, reference.base)
        return Comparison(
            subject="change by the adapter",
            against="that of the original",
            samples=len(lacking),
            figures={
                "explained_change": round_figure(1 - missed / moved),
                "fidelity_without_adapter": round_figure(lacking.mean()),
            },
            required={"explained_change": round_figure(self.tolerance.loosen(SKILL_LEAST))},
        )


def measure_effect(reference: AdapterAnswers, candidate: AdapterAnswers) -> tuple[float, float]:
    """Sum the squares of what an adapter changes in the original's distributions, and those of what the candidate's
    change differs by from it."""
    moved = missed = 0.0
    answers = (reference.base, reference.adapted, candidate.base, candidate.adapted)
    for before, after, own_before, own_after in zip(*(each[PROBABILITIES] for each in answers), strict=True):
        change = after.astype(np.float64) - before
        own = np.nan_to_num(own_after.astype(np.float64) - own_before)
        moved += float((change**2).sum())
        missed += float(((own - change) ** 2).sum())
    return moved, missed
