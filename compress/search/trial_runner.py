"""Trial runner: runs trials and builds artifacts for a search, and charges the time to its budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compress.search.budget import Budget
from compress.search.constraints import Constraints, Quality
from compress.search.executor import Executor
from compress.search.results import OUTCOME, BuiltArtifact, TrialOutcome
from compress.search.search_candidate import SearchCandidate, describe_misses
from compress.search.search_space import apply_settings
from compress.search.trial_job import SearchContext, TrialJob
from laconic.cache import Cache
from laconic.hashing import hash_of
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe


@dataclass
class TrialRunner:
    """recipe: the user's. context: the source and the samples. run_trial: gives an outcome, JSON-ready. build_artifact:
    of a recipe, given the quality before quantization. The other fields are those of `search`."""

    recipe: Recipe
    context: SearchContext
    constraints: Constraints
    budget: Budget
    executor: Executor
    trust: bool
    steps: Steps
    cache: Cache
    run_trial: Callable[[TrialJob], dict[str, Any]]
    build_artifact: Callable[[Recipe, Quality, Constraints], BuiltArtifact]

    def run_trials(self, group: Sequence[SearchCandidate], kind: str = "cut", units: float = 1) -> list[TrialOutcome]:
        """Prune and heal each candidate, in the workers or from the cache. kind, units: for the budget."""
        jobs = [
            TrialJob(
                self.recipe_of(each).model_dump_json(), self.trust, str(self.cache.folder), torch.get_num_threads()
            )
            for each in group
        ]
        found = [OUTCOME.validate_python(each) for each in self.executor.map(self.run_trial, jobs)]
        self.charge(kind, *(job.recipe for job in jobs), units=units)
        return found

    def build(self, candidate: SearchCandidate) -> BuiltArtifact:
        """Build the artifact of a candidate that has been through a trial."""
        assert candidate.quality is not None
        with self.steps.step(f"build: {candidate.name}") as step:
            made = self.build_artifact(self.recipe_of(candidate), candidate.quality, self.constraints)
            verdict = describe_misses(self.constraints, made) or "goal met"
            step.note = f"{made.speedup:.2f} x, fidelity {made.quality.fidelity:.4f}; {verdict}"
        self.charge("build", self.recipe_of(candidate).model_dump_json())
        return made

    def recipe_of(self, candidate: SearchCandidate) -> Recipe:
        """The recipe that makes a candidate."""
        return apply_settings(self.recipe, candidate.settings, candidate.heals)

    def has_time_for(self, kind: str, units: float = 1, *, build: bool = False) -> bool:
        """Whether the budget allows for more of a kind of work, and for the verdict of the best artifact, which takes
        as long as building it. build: and for building an artifact afterwards."""
        return self.budget.allows(kind, units, keep=(1 + build) * (self.budget.estimate("build") or 0.0))

    def charge(self, kind: str, *parts: str, units: float = 1) -> None:
        """Charge the time since the last charge to the budget. parts: what identifies the piece of work."""
        self.budget.charge(hash_of("lap", self.context.key, kind, parts), kind, units)
