"""Search for the best artifact that meets a goal, within a time budget: pruning, healing and precision are varied."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compress.pipeline import compress
from compress.search.budget import Budget
from compress.search.candidate_build import build_candidate
from compress.search.constraints import Constraints
from compress.search.executor import open_executor
from compress.search.results import BuiltArtifact
from compress.search.strategy import run_search
from compress.search.trial import make_base_recipe, open_context, run_trial
from compress.search.trial_runner import TrialRunner
from export.candidates.engine_option import list_options
from export.pipeline import Result
from export.report.report import add_search
from export.validation.missed import find_missed
from laconic.artifacts.artifact import Artifact, check_destination, publish_artifact
from laconic.cache import Cache, open_scratch_folder
from laconic.errors import UsageError
from laconic.hardware import cores
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.registry import trust_addresses
from laconic.timing.measurements import TrialRecord


@dataclass(frozen=True)
class SearchResult(Result):
    """The result of a search. Its artifact's `measured.search` lists the trials, those on the Pareto front marked.

    spent: seconds of the budget that were used. overrun: seconds beyond it.
    """

    spent: float = 0.0
    overrun: float = 0.0


def search(
    recipe: Recipe,
    destination: Path,
    *,
    budget: float,
    executor: str = "local",
    trials: int | None = None,
    trust: bool = False,
    steps: Steps | None = None,
    cache: Cache | None = None,
) -> SearchResult:
    """Write to `destination` the best artifact for the recipe's goal that is found in `budget` seconds.

    Of the artifacts that meet the goal the fastest is best where the goal limits the drop or the fidelity; where it
    limits only latency or size, the one with the highest fidelity is. The best artifact so far is at the destination at
    any time, and is replaced atomically. Artifacts are compared by half of the test samples, and the verdict of the one
    that is chosen comes from the other half, which no choice has seen. An interrupted search resumes from the cache and
    repeats nothing; the budget covers all its runs together. Where the goal is missed the best artifact is written all
    the same, and the result lists what it misses.

    executor: "local", or "ray" for a cluster. trials: the most settings that are tried; with the same number the same
    seed gives the same artifact, except for what depends on measured times. None: as many as the budget allows.
    Raises a LaconicError for an invalid source, data or recipe.
    """
    steps, cache = steps or Steps(), cache or Cache()
    check_destination(destination)
    check_engine_is_here(recipe)
    with steps.step("load the source and the samples") as step:
        open_context.cache_clear()  # another search of this process may have read other files
        context = open_context(make_base_recipe(recipe), trust, str(cache.folder))
        constraints = Constraints.from_goal(recipe.goal, context.source.task, context.samples.choose)
        step.note = f"{context.source.task.name}, {len(context.samples.choose)} samples to choose by"

    def publish_best(best: BuiltArtifact, trials: Sequence[TrialRecord]) -> None:
        publish(Path(best.folder), trials, destination)

    clock = Budget(budget, cache)
    with open_executor(executor, cores()) as workers, trust_addresses(trust):
        build = partial(build_candidate, context=context, trust=trust, cache=cache)
        runner = TrialRunner(recipe, context, constraints, clock, workers, trust, steps, cache, run_trial, build)
        state = run_search(runner, publish_best, trials)
        if state.best_artifact is not None:
            with steps.step("validate the best") as step:
                judge_best(state.best_artifact, state.trials, destination, trust=trust, cache=cache)
                runner.charge("verdict", state.best_artifact.recipe)
                step.note = describe_verdict(destination)
    count = len(state.candidates)
    beyond = f", {clock.overrun:.0f} s too long" if clock.overrun else ""
    steps.report("search", f"{count} candidates, {clock.spent:.0f} s of {budget:.0f} s{beyond}")
    artifact = Artifact.load(destination)
    return SearchResult(artifact, tuple(find_missed(artifact, recipe.goal)), clock.spent, clock.overrun)


def publish(folder: Path, trials: Sequence[TrialRecord], destination: Path) -> None:
    """Copy an artifact to the destination, with the trials in its report."""
    with open_scratch_folder(destination) as scratch:
        shutil.copytree(folder, scratch / "artifact")
        add_search(scratch / "artifact", [trial.model_dump() for trial in trials])
        publish_artifact(scratch / "artifact", destination)


def judge_best(
    best: BuiltArtifact, trials: Sequence[TrialRecord], destination: Path, *, trust: bool, cache: Cache
) -> None:
    """Build the artifact that was chosen once more, with a verdict from the test samples that no choice has seen, and
    publish it."""
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        artifact = Path(folder) / "artifact"
        recipe = Recipe.model_validate_json(best.recipe)
        compress(recipe, artifact, trust=trust, steps=Steps(quiet=True), cache=cache, part="final")
        publish(artifact, trials, destination)


def describe_verdict(path: Path) -> str:
    """The verdict of an artifact in one line."""
    verdict = Artifact.load(path).manifest.verdict
    return verdict.describe() if verdict else "none"


def check_engine_is_here(recipe: Recipe) -> None:
    """Raise UsageError where no engine of the recipe's target is on this machine: a search times what it builds."""
    if list_options(recipe.engines, recipe.target)[0].reference:
        raise UsageError(
            f"a search times what it builds, and no engine of target {recipe.target!r} is on this machine. Leave out "
            f"--budget, or search where the engine is"
        )
