"""Make an artifact of a candidate: the pipeline's own way to the verdict; and measure what a forecast foretold."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from compress.pipeline import compress
from compress.search.constraints import Aim, Figures, figures
from compress.search.reference_timer import Yardstick
from compress.search.trial import Ground
from export.build import EngineOption
from export.candidates import mean_speedup
from laconic.artifacts.artifact import Artifact
from laconic.cache import Cache
from laconic.hardware import cores, this_machine
from laconic.hashing import code_version, hash_of
from laconic.progress import Steps
from laconic.quantization.plan import Precision
from laconic.recipes.goal import MARGIN, find_missed
from laconic.recipes.recipe import Goal, Recipe
from laconic.recipes.stage import dump_settings
from laconic.runtimes.predict import predict
from laconic.tensor import Arrays
from laconic.timing.benchmark import LENGTH, TRIAL_BATCHES
from laconic.timing.measurements import ORIGINAL

DEMANDS = (0.01, 0.002)
"""Infidelity that quantization may add where the goal is a drop alone: if what comes of the first drops too much, the
second keeps more bits."""

FOLDER = "artifact"


@dataclass(frozen=True)
class Built:
    """An artifact in the cache. precision: of most layers. figures: on the samples that are chosen by. latency: seconds
    for one sample, size: bytes, speedup: over the original, at the batch sizes of a trial. costs: seconds of the
    processor for a run, by batch. failures: what its verdict, on samples that nothing was chosen by, and its goal say
    against it. highest: the upper end of the drop's 95 % interval on those samples; None without labels."""

    folder: str
    option: EngineOption
    precision: Precision
    figures: Figures
    latency: float
    size: float
    speedup: float
    costs: Mapping[int, float]
    failures: tuple[str, ...]
    highest: float | None = None


BUILT = TypeAdapter(Built)


def build(recipe: Recipe, base: Ground, before: Figures, aim: Aim, *, trust: bool, steps: Steps, cache: Cache) -> Built:
    """The artifact of a candidate. before: its figures, before it is quantized."""
    for demand in DEMANDS:
        made = built(recipe.model_copy(update={"goal": asked(recipe.goal, before, demand)}), base, trust, steps, cache)
        if aim.tolerance is not None or aim.shortfall(made.figures) <= 1 or aim.shortfall(before) > 1:
            break
    return made


def asked(goal: Goal, before: Figures, demand: float) -> Goal:
    """The goal of one candidate: where a drop alone is asked, quantization is told by a fidelity what it may add."""
    if goal.max_drop is None or goal.fidelity is not None:
        return goal
    allowed = (1 - before.fidelity + demand) / MARGIN
    return goal.model_copy(update={"fidelity": round(max(1 - allowed, 0.0), 6), "worst": 0.0})


def built(recipe: Recipe, base: Ground, trust: bool, steps: Steps, cache: Cache) -> Built:
    """The artifact of a recipe, and what was measured of it; from the cache, where it is there."""
    stages = [(step.name, dump_settings(step.make_stage())) for step in recipe.stages]
    goal = recipe.goal.model_dump(mode="json")
    machine = this_machine().model_dump()
    key = hash_of("built", base.key, stages, goal, recipe.seed, recipe.engines, machine, code_version())

    def fill(folder: Path) -> None:
        compress(recipe, folder / FOLDER, trust=trust, steps=steps, cache=cache)

    folder = cache.directory(f"built-{key}", fill) / FOLDER
    found = cache.json(f"figures-{key}", lambda: BUILT.dump_python(measured(recipe, base, folder, cache), mode="json"))
    return BUILT.validate_python(found)


def measured(recipe: Recipe, base: Ground, folder: Path, cache: Cache) -> Built:
    """Look into a finished artifact."""
    artifact = Artifact.load(folder)
    task, choose = base.source.task, base.samples.choose

    def original() -> Arrays:
        with base.source.open(cores()) as session:
            return predict(session, task, choose)

    key = hash_of("original", base.source.key, choose.fingerprint, code_version())
    reference = cache.arrays(f"answers-{key}", original)
    option = EngineOption(artifact.manifest.placement, artifact.manifest.compute)
    yardstick = Yardstick(option, cache)
    with artifact.open(threads=1) as session:
        found = predict(session, task, choose)
        costs = {batch: yardstick.timed(session, task.typical(batch, LENGTH)) for batch in TRIAL_BATCHES}
    assert artifact.manifest.verdict is not None
    drift = artifact.manifest.verdict.drift
    changes = [each.intervals["metric_change"] for each in drift if "metric_change" in each.intervals]
    own = [time for time in artifact.measured.timings if time.engine != ORIGINAL and time.batch in TRIAL_BATCHES]
    return Built(
        folder=str(folder),
        option=option,
        precision=most(artifact.manifest.precision),
        figures=figures(task, reference, found, choose, recipe.seed),
        latency=artifact.measured.lone_latency,
        size=float(artifact.size),
        speedup=mean_speedup(own),
        costs=costs,
        failures=tuple(find_missed(artifact, recipe.goal)),
        highest=max((-low for low, _ in changes), default=None),
    )


def most(precision: Mapping[str, str]) -> Precision:
    """What most layers are kept and computed in."""
    found: Precision = Counter(precision.values()).most_common(1)[0][0]  # type: ignore[assignment]
    return found


def geometric(ratios: Mapping[int, float]) -> float:
    """One figure for several batch sizes."""
    return float(np.exp(np.mean([np.log(each) for each in ratios.values()])))
