"""Evaluation of a candidate, cached: prune and heal a model and measure its quality; build an artifact and measure its
quality, latency and size."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from compress.pipeline import apply_stages, compress, torch_stages
from compress.search.constraints import Constraints, Quality, measure_quality
from compress.search.executor import SearchContext
from compress.search.layer_spec import read_layer_specs
from compress.search.layer_timing import ReferenceTimer
from compress.search.search_candidate import BuiltArtifact, TrialOutcome
from export.candidates.candidate import mean_speedup
from export.candidates.engine_option import EngineOption
from export.lineage import Lineage
from export.sources import as_checkpoint_source, open_source
from export.validation.missed import find_doubts, find_failures
from laconic.artifacts.artifact import Artifact
from laconic.cache import Cache
from laconic.errors import LaconicError
from laconic.hardware import cores, this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.models.checkpoint import Checkpoint
from laconic.progress import Steps
from laconic.quantization.plan import Precision
from laconic.recipes.goal import MARGIN, Goal
from laconic.recipes.job import Job
from laconic.recipes.recipe import NamedStage, Recipe
from laconic.recipes.splits import split_samples
from laconic.recipes.stage import TorchStage, describe_stage
from laconic.registry import trust_addresses
from laconic.runtimes.predict import predict
from laconic.timing.benchmark import LENGTH, TRIAL_BATCHES
from laconic.timing.measurements import ORIGINAL

MATRIX_BYTES, VECTOR_BYTES = 1, 4
"""Bytes of a number in a matrix (INT8) and in a vector (FP32) of a quantized artifact."""

QUANTIZATION_INFIDELITY = (0.01, 0.002)
"""Infidelity that quantization may add where only the drop is constrained. Where the first value leads to too large a
drop, the second is tried, which keeps more layers in higher precision."""

FOLDER = "artifact"
OUTCOME, BUILT = TypeAdapter(TrialOutcome), TypeAdapter(BuiltArtifact)


def open_context(recipe: Recipe, trust: bool, cache: Path, threads: int) -> SearchContext:
    """Open the source and the samples of a recipe, which are the same for all candidates. cache: its folder."""
    common = {"stages": (NamedStage(name="quantize.static"),), "goal": Goal(max_drop=recipe.goal.max_drop)}
    recipe, results = recipe.model_copy(update=common), Cache(cache)
    source = open_source(recipe, results, trust=trust, samples=recipe.data.calibrate)
    return SearchContext(source, split_samples(recipe, source.task), trust, results, threads)


def run_trial(context: SearchContext, recipe: Recipe) -> TrialOutcome:
    """Apply the stages of a candidate's recipe, and measure the result before quantization. Where a stage fails,
    the outcome has its error."""
    with trust_addresses(context.trust):
        stages = torch_stages(recipe)
        described = [describe_stage(name, stage) for name, stage in stages]
        key = hash_of("attempt", context.key, described, recipe.seed, environment_digest())

        def compute() -> Any:
            try:
                outcome = compress_and_evaluate(recipe, stages, context)
            except LaconicError as error:
                outcome = TrialOutcome(error=str(error))
            return OUTCOME.dump_python(outcome, mode="json")

        return OUTCOME.validate_python(context.cache.json(f"attempt-{key}", compute))


def compress_and_evaluate(
    recipe: Recipe, stages: Sequence[tuple[str, TorchStage]], context: SearchContext
) -> TrialOutcome:
    """Apply the stages to the source, and measure the result before quantization."""
    task, choose = context.source.task, context.samples.choose
    threads = torch.get_num_threads()
    torch.set_num_threads(context.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
            job = Job(recipe, context.samples, Path(folder), Steps(quiet=True), context.cache)
            lineage = Lineage(context.source, job)
            apply_stages(lineage, stages)
    finally:
        torch.set_num_threads(threads)
    checkpoint = as_checkpoint_source(lineage.model).checkpoint
    with lineage.model.open(cores()) as session:
        outputs = predict(session, task, choose)
    return TrialOutcome(
        quality=measure_quality(task, lineage.reference(choose), outputs, choose, recipe.seed),
        specs=read_layer_specs(checkpoint),
        size=estimate_size(checkpoint),
    )


def estimate_size(checkpoint: Checkpoint) -> float:
    """Estimate the bytes of a checkpoint's weights in INT8."""
    parameters = checkpoint.module.parameters()
    return float(sum((MATRIX_BYTES if tensor.ndim > 1 else VECTOR_BYTES) * tensor.numel() for tensor in parameters))


def build_candidate(context: SearchContext, recipe: Recipe, before: Quality, constraints: Constraints) -> BuiltArtifact:
    """Build a candidate's artifact. before: its quality before quantization."""
    for infidelity in QUANTIZATION_INFIDELITY:
        goal = derive_goal(recipe.goal, before, infidelity)
        artifact = build_recipe(context, recipe.model_copy(update={"goal": goal}))
        is_met = constraints.shortfall(artifact.quality) <= 1
        if constraints.tolerance is not None or is_met or constraints.shortfall(before) > 1:
            break
    return artifact


def derive_goal(goal: Goal, before: Quality, infidelity: float) -> Goal:
    """Derive a candidate's goal: where only a drop is asked for, a fidelity limits what quantization may add."""
    if goal.max_drop is None or goal.fidelity is not None:
        return goal
    allowed = (1 - before.fidelity + infidelity) / MARGIN
    return goal.model_copy(update={"fidelity": round(max(1 - allowed, 0.0), 6), "worst": 0.0})


def build_recipe(context: SearchContext, recipe: Recipe) -> BuiltArtifact:
    """Build the artifact of a recipe and measure it, or take both from the cache."""
    key = make_build_key(context, recipe)

    def fill(folder: Path) -> None:
        steps = Steps(quiet=True)
        compress(recipe, folder / FOLDER, trust=context.trust, steps=steps, cache=context.cache, part="rehearsal")

    def measure() -> Any:
        return BUILT.dump_python(measure_artifact(context, recipe, folder), mode="json")

    folder = context.cache.directory(f"built-{key}", fill) / FOLDER
    return BUILT.validate_python(context.cache.json(f"figures-{key}", measure))


def make_build_key(context: SearchContext, recipe: Recipe) -> str:
    """Make a digest of everything that an artifact depends on; the source and the samples are those of the context."""
    settings = recipe.model_dump(mode="json", exclude={"source", "data"})
    return hash_of("built", context.key, settings, this_machine().model_dump(), environment_digest())


def measure_artifact(context: SearchContext, recipe: Recipe, folder: Path) -> BuiltArtifact:
    """Measure a finished artifact."""
    artifact = Artifact.load(folder)
    task, choose = context.source.task, context.samples.choose
    job = Job(recipe, context.samples, folder, Steps(quiet=True), context.cache)
    reference = Lineage(context.source, job).reference(choose)
    option = EngineOption(artifact.manifest.placement, artifact.manifest.compute)
    timer = ReferenceTimer(option, context.cache)
    with artifact.open(threads=1) as session:
        outputs = predict(session, task, choose)
        costs = {batch: timer.measure(session, task.timed(batch, LENGTH)) for batch in TRIAL_BATCHES}
    timings = [time for time in artifact.measured.timings if time.engine != ORIGINAL and time.batch in TRIAL_BATCHES]
    speed = next((each for each in artifact.measured.writing if each.engine != ORIGINAL), None)
    assert artifact.measured.lone_latency is not None
    return BuiltArtifact(
        folder=str(folder),
        recipe=recipe.model_dump_json(),
        runtime=option.runtime,
        compute=option.compute,
        precision=find_main_precision(artifact.manifest.precision),
        quality=measure_quality(task, reference, outputs, choose, recipe.seed),
        latency=artifact.measured.lone_latency,
        size=float(artifact.size),
        speedup=mean_speedup(timings),
        costs=costs,
        failures=tuple(find_failures(artifact, recipe.goal)),
        doubts=tuple(find_doubts(artifact, recipe.goal)),
        first_token=speed.first_token if speed else None,
        tokens_per_second=speed.tokens_per_second if speed else None,
    )


def find_main_precision(precision: Mapping[str, str]) -> Precision:
    """Find the precision of most layers. precision: by layer."""
    most_common: Precision = Counter(precision.values()).most_common(1)[0][0]  # type: ignore[assignment]
    return most_common
