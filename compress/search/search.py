"""Search for the best artifact that meets a goal, within a time budget: pruning, healing and precision are varied."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from compress.pipeline import compress
from compress.search.budget import Budget, TrialRunner
from compress.search.constraints import Constraints
from compress.search.evaluation import build_candidate, open_context, run_trial
from compress.search.executor import open_executor
from compress.search.search_candidate import BuiltArtifact
from compress.search.strategy import run_search
from export.candidates.engine_option import list_options
from export.pipeline import Result
from export.report.added_sections import add_search
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
        reopen = partial(open_context, recipe, trust, cache.folder, torch.get_num_threads())
        context = reopen()
        task, choose = context.source.task, context.samples.choose
        constraints = Constraints.from_goal(recipe.goal, task, choose)
        step.note = f"{task.name}, {len(choose)} samples to choose by"
    clock = Budget(budget, cache)
    with open_executor(executor, cores(), context, reopen) as workers, trust_addresses(trust):
        runner = TrialRunner(recipe, context, clock, workers, steps, run_trial, build_candidate)
        state = run_search(runner, constraints, partial(publish, destination), trials)
        if state.best_artifact is not None:
            with steps.step("validate the best") as step:
                judge_best(state.best_artifact, state.trials, destination, trust=trust, cache=cache)
                runner.charge("verdict", state.best_artifact.recipe)
                step.note = describe_verdict(destination)
    beyond = f", {clock.overrun:.0f} s too long" if clock.overrun else ""
    steps.report("search", f"{len(state.candidates)} candidates, {clock.spent:.0f} s of {budget:.0f} s{beyond}")
    artifact = Artifact.load(destination)
    return SearchResult(artifact, tuple(find_missed(artifact, recipe.goal)), clock.spent, clock.overrun)


def publish(destination: Path, best: BuiltArtifact, trials: Sequence[TrialRecord]) -> None:
    """Copy an artifact to the destination, with the trials in its report."""
    with open_scratch_folder(destination) as scratch:
        shutil.copytree(best.folder, scratch / "artifact")
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
        publish(destination, replace(best, folder=str(artifact)), trials)


def describe_verdict(path: Path) -> str:
    """Describe the verdict of an artifact in one line."""
    verdict = Artifact.load(path).manifest.verdict
    return verdict.describe() if verdict else "none"


def check_engine_is_here(recipe: Recipe) -> None:
    """Raise UsageError where no engine of the recipe's target is on this machine: a search times what it builds."""
    if list_options(recipe.engines, recipe.target)[0].reference:
        raise UsageError(
            f"a search times what it builds, and no engine of target {recipe.target!r} is on this machine. Leave out "
            f"--budget, or search where the engine is"
        )
