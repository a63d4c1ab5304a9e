"""Build a candidate's artifact with the ordinary pipeline, and measure its quality, latency and size."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from compress.pipeline import compress
from compress.search.constraints import Constraints, Quality, measure_quality
from compress.search.reference_timer import ReferenceTimer
from compress.search.results import BUILT, BuiltArtifact
from compress.search.trial_job import SearchContext
from export.candidates.candidate import mean_speedup
from export.candidates.engine_option import EngineOption
from export.validation.missed import find_doubts, find_failures
from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact
from laconic.cache import Cache
from laconic.hardware import cores, this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.progress import Steps
from laconic.quantization.plan import Precision
from laconic.recipes.goal import MARGIN, Goal
from laconic.recipes.recipe import Recipe
from laconic.runtimes.predict import predict
from laconic.timing.benchmark import LENGTH, TRIAL_BATCHES
from laconic.timing.measurements import ORIGINAL

QUANTIZATION_INFIDELITY = (0.01, 0.002)
"""Infidelity that quantization may add where only the drop is constrained. Where the first value leads to too large a
drop, the second is tried, which keeps more layers in higher precision."""

FOLDER = "artifact"


def build_candidate(
    recipe: Recipe, before: Quality, constraints: Constraints, *, context: SearchContext, trust: bool, cache: Cache
) -> BuiltArtifact:
    """Build a candidate's artifact. before: its quality before quantization."""
    steps = Steps(quiet=True)
    for infidelity in QUANTIZATION_INFIDELITY:
        goal = derive_goal(recipe.goal, before, infidelity)
        made = build_recipe(recipe.model_copy(update={"goal": goal}), context, trust, steps, cache)
        if (
            constraints.tolerance is not None
            or constraints.shortfall(made.quality) <= 1
            or constraints.shortfall(before) > 1
        ):
            break
    return made


def derive_goal(goal: Goal, before: Quality, infidelity: float) -> Goal:
    """The goal for one candidate: where only a drop is asked for, a fidelity limits what quantization may add."""
    if goal.max_drop is None or goal.fidelity is not None:
        return goal
    allowed = (1 - before.fidelity + infidelity) / MARGIN
    return goal.model_copy(update={"fidelity": round(max(1 - allowed, 0.0), 6), "worst": 0.0})


def build_recipe(recipe: Recipe, context: SearchContext, trust: bool, steps: Steps, cache: Cache) -> BuiltArtifact:
    """The artifact of a recipe with its measurements, from the cache where it is there."""
    key = make_build_key(recipe, context)

    def fill(folder: Path) -> None:
        compress(recipe, folder / FOLDER, trust=trust, steps=steps, cache=cache, part="rehearsal")

    def measure() -> dict[str, object]:
        return dict(BUILT.dump_python(measure_artifact(recipe, context, folder, cache), mode="json"))

    folder = cache.directory(f"built-{key}", fill) / FOLDER
    return BUILT.validate_python(cache.json(f"figures-{key}", measure))


def make_build_key(recipe: Recipe, context: SearchContext) -> str:
    """A digest of everything that an artifact depends on; the source and the samples are those of the context."""
    settings = recipe.model_dump(mode="json", exclude={"source", "data"})
    return hash_of("built", context.key, settings, this_machine().model_dump(), environment_digest())


def measure_artifact(recipe: Recipe, context: SearchContext, folder: Path, cache: Cache) -> BuiltArtifact:
    """Measure a finished artifact."""
    artifact = Artifact.load(folder)
    task, choose = context.source.task, context.samples.choose

    def run_original() -> Arrays:
        with context.source.open(cores()) as session:
            return predict(session, task, choose)

    key = hash_of("original", context.source.key, choose.fingerprint, environment_digest())
    reference = cache.arrays(f"answers-{key}", run_original)
    option = EngineOption(artifact.manifest.placement, artifact.manifest.compute)
    timer = ReferenceTimer(option, cache)
    with artifact.open(threads=1) as session:
        found = predict(session, task, choose)
        costs = {batch: timer.measure(session, task.timed(batch, LENGTH)) for batch in TRIAL_BATCHES}
    own = [time for time in artifact.measured.timings if time.engine != ORIGINAL and time.batch in TRIAL_BATCHES]
    assert artifact.measured.lone_latency is not None
    return BuiltArtifact(
        folder=str(folder),
        recipe=recipe.model_dump_json(),
        runtime=option.runtime,
        compute=option.compute,
        precision=most_common_precision(artifact.manifest.precision),
        quality=measure_quality(task, reference, found, choose, recipe.seed),
        latency=artifact.measured.lone_latency,
        size=float(artifact.size),
        speedup=mean_speedup(own),
        costs=costs,
        failures=tuple(find_failures(artifact, recipe.goal)),
        doubts=tuple(find_doubts(artifact, recipe.goal)),
    )


def most_common_precision(precision: Mapping[str, str]) -> Precision:
    """The precision of most layers. precision: by layer."""
    found: Precision = Counter(precision.values()).most_common(1)[0][0]  # type: ignore[assignment]
    return found
