"""Search for what meets a goal: how much to cut, how long to heal, which precision; within a budget of time."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.search.budget import Budget
from compress.search.constraints import Aim
from compress.search.executor import executor
from compress.search.search_candidate import Candidate
from compress.search.strategy import search
from compress.search.trial import ground, origin
from compress.search.trial_runner import Workshop
from export.pipeline import Result
from export.report.report import add_search
from laconic.artifacts.artifact import Artifact, check_destination, publish_artifact
from laconic.cache import Cache, open_scratch_folder
from laconic.hardware import cores
from laconic.progress import Steps
from laconic.recipes.goal import find_missed
from laconic.recipes.recipe import Recipe
from laconic.timing.measurements import TrialRecord


@dataclass(frozen=True)
class Solution(Result):
    """The artifact's measured.search is what was tried, the Pareto front marked. spent, overrun: seconds, of the budget
    and beyond."""

    spent: float = 0.0
    overrun: float = 0.0


def solve(
    recipe: Recipe,
    destination: Path,
    *,
    budget: float,
    engine: str = "local",
    trials: int | None = None,
    trust: bool = False,
    steps: Steps | None = None,
    cache: Cache | None = None,
) -> Solution:
    """Write to `destination` the best artifact for the recipe's goal that is found in `budget` seconds.

    Once the goal is met, faster is better where a drop or a fidelity bounds it; where only latency or size do, more
    faithful is. The best so far lies at the destination at any time, and is replaced whole. A search that was killed
    goes on, and nothing is done twice; the budget is of all its runs together. engine: "local", or "ray" for a cluster.
    trials: at most so many settings are tried; with the same number of them the same seed gives the same artifact, but
    for what the clock of the machine says of it. Without it, time decides how many.
    Where the goal is missed the best artifact is written all the same, and the result says what it misses.
    Raises a LaconicError for a source, data or a recipe that is wrong.
    """
    steps, cache = steps or Steps(), cache or Cache()
    check_destination(destination)
    with steps.step("load the source and the samples") as step:
        ground.cache_clear()  # another search of this process may have read other files
        base = ground(origin(recipe), trust, str(cache.folder))
        aim = Aim.of(recipe.goal, base.source.task, base.samples.choose)
        step.note = f"{base.source.task.name}, {len(base.samples.choose)} samples to choose by"

    def publish_best(best: Candidate, trials: Sequence[TrialRecord]) -> None:
        assert best.built is not None
        with open_scratch_folder(destination) as folder:
            shutil.copytree(best.built.folder, folder / "artifact")
            add_search(folder / "artifact", [trial.model_dump() for trial in trials])
            publish_artifact(folder / "artifact", destination)

    clock = Budget(budget, cache)
    with executor(engine, cores()) as workers:
        shop = Workshop(recipe, base, aim, clock, workers, trust, steps, cache)
        count = len(search(shop, publish_best, trials).candidates)
    beyond = f", {clock.overrun:.0f} s too long" if clock.overrun else ""
    steps.report("search", f"{count} candidates, {clock.spent:.0f} s of {budget:.0f} s{beyond}")
    artifact = Artifact.load(destination)
    return Solution(artifact, tuple(find_missed(artifact, recipe.goal)), clock.spent, clock.overrun)
