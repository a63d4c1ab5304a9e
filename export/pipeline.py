"""The export pipeline, from a model to a validated artifact: capture, plan, build per engine, time, validate, write."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from export.candidates.alternatives import place_alternatives
from export.candidates.audit import KernelAudit
from export.candidates.candidate import (
    EngineCandidate,
    choose_fastest,
    describe_float_cache,
    describe_missed,
    describe_unmet,
    format_candidate,
    prefer_int8,
)
from export.candidates.candidate_builder import SOUND_SAMPLES, CandidateBuilder
from export.candidates.collect_evidence import PARITY_SAMPLES, collect_evidence
from export.candidates.dynamic_baseline import compare_dynamic
from export.candidates.engine_option import SENSITIVITY_OPTION, EngineOption, list_recipe_options
from export.candidates.layer_trials import LayerTrials
from export.candidates.magnitudes import OVERFLOW_SAMPLES, describe_overflow, find_overflow
from export.candidates.multiply_adds import count_products, limit_samples
from export.candidates.plan_evaluator import PlanEvaluator
from export.candidates.race import measure_chosen, race
from export.capture.graph_file import list_unquantized
from export.lineage import Lineage, open_lineage, summarize_quality
from export.placements.split_decoder import is_text_decoder
from export.report.report import render_report
from export.sources import capture_graph, copy_graph, find_divergence, measure_capture_error
from export.validation.evidence import GraphDeviation
from export.validation.missed import find_missed
from export.validation.validate import engine_tolerance, is_batch_independent, validate
from laconic import __version__
from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact, check_destination, publish_artifact
from laconic.artifacts.record import Record
from laconic.artifacts.verdict import Verdict
from laconic.artifacts.writer import ArtifactParts, PlacedModel, write_artifact_folder
from laconic.cache import Cache
from laconic.data.batches import batches
from laconic.data.dataset import Dataset
from laconic.errors import DataError
from laconic.files import folder_size
from laconic.hardware import this_machine
from laconic.models.footprint import LENGTH
from laconic.progress import Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, PrecisionLadder
from laconic.quantization.plan_file import pack_plan
from laconic.recipes.goal import required_tolerance
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import TestPart
from laconic.recipes.stage import PlanContext, PlanStage, dump_settings, find_intact_records
from laconic.runtimes.product import Product
from laconic.runtimes.runtime import make_runtime
from laconic.tasks.fidelity import find_broken_answer
from laconic.tasks.task import Task

PARTS: dict[TestPart, str] = {"all": "", "final": "", "rehearsal": "samples that the search chooses by"}
"""What the test samples of a verdict are, where they are no unseen ones."""
WRITING_TARGETS = ("cpu",)
"""The targets whose engines write; on others language models score."""
EXACT_SAMPLES = 32
"""Samples on which the captured graph is compared with the original, beside made-up inputs."""


@dataclass(frozen=True)
class Result:
    """An artifact, and a sentence for each part of the goal that it does not meet."""

    artifact: Artifact
    missed: tuple[str, ...]


def export(
    recipe: Recipe, destination: Path, *, trust: bool = False, steps: Steps | None = None, cache: Cache | None = None
) -> Result:
    """Write the source of a recipe as an artifact for the fastest engine, whole or not at all.

    Only the recipe's quantization stages are applied; stages that change the module are applied by `compress`. An
    interrupted run resumes from the cache. If the goal is not met, the best artifact is written and the result lists
    the unmet parts. Raises a LaconicError for an invalid source, data or recipe.
    """
    check_destination(destination)
    with open_lineage(recipe, destination, steps or Steps(), cache or Cache(), trust=trust) as lineage:
        return write_artifact(lineage, destination)


def write_artifact(lineage: Lineage, destination: Path) -> Result:
    """Build, validate and write the artifact of a lineage's model."""
    folder = lineage.job.folder / "artifact"
    if lineage.job.recipe.target not in WRITING_TARGETS:
        lineage.drop_cache()
    write_artifact_folder(EngineBuild(lineage).make_parts(), folder)
    publish_artifact(folder, destination)
    artifact = Artifact.load(destination)
    return Result(artifact, tuple(find_missed(artifact, lineage.job.recipe.goal)))


class EngineBuild:
    """The steps from one model's graph to the parts of its artifact."""

    def __init__(self, lineage: Lineage, ladder: PrecisionLadder | None = None, *, against: str = "") -> None:
        """ladder: the plans to try, in place of those that the recipe's stages would propose. against: the name of what
        the artifact is compared with, where it is not the original."""
        job = lineage.job
        self.ladder = ladder
        self.against = against or (f"model after {lineage.teacher}" if lineage.teacher else "original")
        self.lineage = lineage
        self.recipe = job.recipe
        self.samples = job.samples
        self.folder = job.folder
        self.steps = job.steps
        self.cache = job.cache
        self.task: Task = lineage.model.task
        self.tolerance = required_tolerance(self.task, job.recipe.goal)
        if not job.samples.fingerprints:
            # Made-up samples may be so unlike real ones that the original answers all of them alike.
            self.tolerance = self.tolerance.model_copy(update={"slack": 0.0})

    def make_parts(self) -> ArtifactParts:
        """Run all steps, and return the parts of the artifact."""
        if limit := self.task.describe_limit():
            self.steps.warn(limit)
        graph, products, deviation = self.capture()
        evaluator = PlanEvaluator(graph, self.task, self.cache, self.folder, self.compute_references())
        options = self.list_options(graph)
        start = time.perf_counter()
        stages = self.list_plan_stages()
        ladder = self.ladder or self.plan_cache(graph, self.plan(stages, graph, evaluator, options[0]))
        candidates, seconds = self.build_candidates(graph, products, evaluator, ladder, options, start)
        chosen = choose_fastest(prefer_int8(candidates, self.recipe.goal.int8_share or 0.0))
        for missed in filter(None, (describe_missed(chosen), describe_float_cache(ladder.rungs[0][0], chosen.plan))):
            self.steps.warn(missed)
        for name, stage in stages:
            if unmet := describe_unmet(ladder.rungs[0][0], chosen.plan):
                self.steps.warn(f"{name}: {unmet}")
            self.record_stage(name, stage, chosen, seconds)
        few = self.samples.judge.take(limit_samples(PARITY_SAMPLES, products), self.recipe.seed)
        judge = partial(self.validate, few=few, evaluator=evaluator, deviation=deviation)
        with self.steps.step("validate") as step:
            verdict, golden = judge(chosen)
            step.note = verdict.describe()
        placed = place_alternatives(candidates, chosen, graph, judge, self.folder / "alternatives", self.steps)
        alternatives = tuple(placed) if self.recipe.portable else ()
        dynamic = None
        if stages and self.ladder is None:
            source, answer = self.lineage.source, self.lineage.reference
            dynamic = compare_dynamic(chosen, source, self.samples, answer, self.tolerance, self.steps)
        measured = measure_chosen(chosen, self.lineage.source, self.task, self.steps, self.lineage.seconds)
        lines = [format_candidate(candidate, chosen=candidate is chosen) for candidate in candidates]
        return ArtifactParts(
            manifest=self.make_manifest(chosen, graph, verdict, alternatives),
            model=chosen.model,
            task=self.task,
            golden=golden,
            measured=measured.model_copy(update={"dynamic": dynamic}),
            report=partial(render_report, recipe=self.recipe, ladder=ladder, graph=graph, candidates=lines),
            calibration=pack_plan(chosen.plan),
            graph_key=graph.key,
            extras=copy_graph(graph, self.folder / "graph") if self.recipe.keep_graph else (),
            alternatives=alternatives,
        )

    def capture(self) -> tuple[Graph, tuple[Product, ...], GraphDeviation | None]:
        """Capture the float graph with the products of a typical sample, and measure how far it is from its source."""
        model = self.lineage.model
        with self.steps.step("capture the graph") as step:
            graph = capture_graph(model, self.cache)
            shapes = {name: array.shape for name, array in self.task.typical(1, LENGTH).items()}
            products = count_products(graph, shapes)
            few = self.samples.choose.take(limit_samples(EXACT_SAMPLES, products), self.recipe.seed)
            error = measure_capture_error(model, graph, few, self.cache)
            node = "" if error is None or error <= 1 - model.exactness else find_divergence(model, graph, few)
            step.note = f"{len(graph.layers)} layers, error {error or 0:.1g}" + (f" from {node} on" if node else "")
        for note in list_unquantized(graph) if self.list_plan_stages() else ():
            self.steps.warn(note)
        return graph, products, None if error is None else GraphDeviation(error, node, model.exactness)

    def list_plan_stages(self) -> list[tuple[str, PlanStage]]:
        """List the quantization stages of the recipe with their names."""
        stages = zip((step.name for step in self.recipe.stages), self.recipe.make_stages(), strict=True)
        return [(name, stage) for name, stage in stages if isinstance(stage, PlanStage)]

    def build_candidates(
        self,
        graph: Graph,
        products: tuple[Product, ...],
        evaluator: PlanEvaluator,
        ladder: PrecisionLadder,
        options: Sequence[EngineOption],
        start: float,
    ) -> tuple[list[EngineCandidate], float]:
        """Build the candidates and race them, the float graph too where everything smaller is slower than the original.

        start: when planning began, by `time.perf_counter`. Returns the candidates, and the seconds from then until they
        were built.
        """
        audit = KernelAudit(graph, self.task, products, ladder.rungs[0][0])
        time_all = partial(
            race, source=self.lineage.source, task=self.task, graph=graph, cache=self.cache, steps=self.steps
        )
        builder = CandidateBuilder(
            self.lineage.job,
            evaluator,
            partial(audit.check, samples=self.samples.choose.samples[:1]),
            self.tolerance,
            engine_tolerance(self.tolerance),
            self.samples.choose.take(limit_samples(SOUND_SAMPLES, products), self.recipe.seed),
        )
        built = builder.build_all(ladder, options)
        seconds = time.perf_counter() - start
        raced = len(built) > 1 or builder.list_float_pairs(ladder, options)
        candidates = time_all(built) if raced else built
        if any(candidate.is_quick for candidate in candidates) or all(candidate.is_plain for candidate in candidates):
            return candidates, seconds
        names = {candidate.name for candidate in built}
        plain = [candidate for candidate in builder.build_float_graph(ladder, options) if candidate.name not in names]
        return (time_all([*built, *plain]) if plain else candidates), seconds

    def compute_references(self) -> dict[str, Arrays]:
        """Compute the original's outputs for the validation and test samples, by the samples' fingerprint."""
        sets = (self.samples.choose, self.samples.probe, self.samples.judge)
        with self.steps.step("run the original model", sum(map(len, sets))) as step:
            references = {dataset.fingerprint: self.lineage.reference(dataset, step) for dataset in sets}
        for dataset in sets:
            if broken := find_broken_answer(references[dataset.fingerprint]):
                name, index = broken
                raise DataError(
                    f"the original itself answers {dataset.describe_sample(index)} with NaN or infinity (output "
                    f"{name!r}), so that nothing can be compared with it. Give samples that it can answer"
                )
        return references

    def list_options(self, graph: Graph) -> list[EngineOption]:
        """List the engine options to build for, the preferred first. Those in FP16 know what exceeds it."""
        options = list_recipe_options(self.recipe, graph, self.lineage.origin, self.steps)
        if not any(option.compute == "float16" for option in options):
            return options
        with self.steps.step("find what exceeds FP16") as step:
            few = self.samples.choose.take(OVERFLOW_SAMPLES, self.recipe.seed)
            overflow = find_overflow(graph, (batch for _, batch in batches(few, self.task, 1)), self.folder)
            step.note = describe_overflow(overflow)
        return [replace(option, overflow=overflow) for option in options]

    def plan(
        self,
        stages: Sequence[tuple[str, PlanStage]],
        graph: Graph,
        evaluator: PlanEvaluator,
        option: EngineOption,
    ) -> PrecisionLadder:
        """Return the plans that the quantization stage proposes; without one, the float graph. option: the preferred
        one, which sensitivity is measured with where no engine of the CPU can run the plans."""
        if not stages:
            return PrecisionLadder.of(Plan({layer.node: "float32" for layer in graph.layers}))
        ((name, stage),) = stages
        judge = SENSITIVITY_OPTION if self.recipe.target == "cpu" else option
        trial = LayerTrials(evaluator, judge, self.samples.probe)
        context = self.lineage.context(name, stage)
        history = find_intact_records(self.lineage.history)
        saturates = self.recipe.target == "cpu" and this_machine().int8_saturates
        return stage.plan(graph, PlanContext(**vars(context), trial=trial, history=history, int8_saturates=saturates))

    def plan_cache(self, graph: Graph, ladder: PrecisionLadder) -> PrecisionLadder:
        """Return the ladder with the cache as the recipe asks for it."""
        if not (self.recipe.int8_kv_cache or self.recipe.int4_value_cache):
            return ladder
        if is_text_decoder(graph):
            return ladder.with_rounded_cache(int8=self.recipe.int8_kv_cache, int4_values=self.recipe.int4_value_cache)
        self.steps.warn("a cache in 8 or 4 bits changes nothing here: it takes a language model that writes")
        return ladder

    def record_stage(self, name: str, stage: PlanStage, chosen: EngineCandidate, seconds: float) -> None:
        """Append the quantization stage to the history, with its size, fidelity and duration."""
        size, key = folder_size(chosen.model.parent), self.lineage.context(name, stage).key
        figures = {"bytes": size, **summarize_quality(self.task, chosen.fidelity, chosen.divergence)}
        self.lineage.history.append(Record(stage=name, config=dump_settings(stage), key=key, figures=figures))
        self.lineage.seconds[key] = seconds

    def validate(
        self, chosen: EngineCandidate, few: Dataset, evaluator: PlanEvaluator, deviation: GraphDeviation | None
    ) -> tuple[Verdict, list[tuple[Arrays, Arrays]]]:
        """Derive the verdict from the test samples, and make the golden pairs of inputs and outputs."""
        evidence, golden = collect_evidence(
            chosen.option,
            chosen.model,
            self.task,
            self.samples.judge,
            few,
            original=evaluator.reference[self.samples.judge.fingerprint],
            deviation=deviation,
            basis=PARTS[self.samples.part] if self.samples.fingerprints else "made-up samples",
            original_name=self.against,
        )
        return validate(evidence, self.task, self.tolerance, self.recipe.goal, self.recipe.seed), golden

    def make_manifest(
        self, chosen: EngineCandidate, graph: Graph, verdict: Verdict, alternatives: Sequence[PlacedModel]
    ) -> dict[str, Any]:
        """Make the manifest, JSON-ready, without the digests of the files and the alternatives themselves."""
        others = [model.placement.verdict for model in alternatives]
        engines = [make_runtime(model.placement.runtime) for model in alternatives]
        versions = {"laconic": __version__, "python": platform.python_version()}
        versions |= {chosen.option.package: chosen.option.version}
        versions |= {engine.package: engine.version() for engine in engines}
        return {
            "task": self.task.name,
            "inputs": [spec.model_dump(mode="json") for spec in graph.inputs],
            "outputs": [spec.model_dump(mode="json") for spec in graph.outputs],
            "target": self.recipe.target,
            "placement": chosen.option.runtime,
            "compute": chosen.option.compute,
            **{key: True for key in ("int8_kv_cache", "int4_value_cache") if getattr(chosen.plan, key)},
            "precision": dict(sorted(chosen.plan.precision.items())),
            "source": self.lineage.describe_source(),
            "history": [record.model_dump(mode="json") for record in self.lineage.history],
            "recipe": self.recipe.model_dump(mode="json", exclude={"source", "data"}),
            "verdict": verdict.model_dump(mode="json"),
            "batching": all(is_batch_independent(judged) for judged in (verdict, *others) if judged),
            "versions": versions,
            "data": self.samples.fingerprints,
            "licence": self.lineage.source.licence,
        }
