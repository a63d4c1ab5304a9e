"""Trial runner: runs trials and builds artifacts for a search, and charges the time to its budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.search.budget import Budget
from compress.search.candidate_build import build_candidate
from compress.search.constraints import Constraints
from compress.search.executor import Executor
from compress.search.results import OUTCOME, BuiltArtifact, TrialOutcome
from compress.search.search_candidate import SearchCandidate, describe_misses
from compress.search.search_space import apply_settings
from compress.search.trial import SearchContext, TrialJob, run_trial
from laconic.cache import Cache
from laconic.hashing import hash_of
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe


@dataclass
class TrialRunner:
    """recipe: the user's. context: the source and the samples. The other fields are those of `search`."""

    recipe: Recipe
    context: SearchContext
    constraints: Constraints
    budget: Budget
    executor: Executor
    trust: bool
    steps: Steps
    cache: Cache

    def run_trials(self, group: Sequence[SearchCandidate], kind: str = "cut", units: float = 1) -> list[TrialOutcome]:
        """Prune and heal each candidate, in the workers or from the cache. kind, units: for the budget."""
        jobs = [
            TrialJob(
                self.recipe_of(each).model_dump_json(), self.trust, str(self.cache.folder), torch.get_num_threads()
            )
            for each in group
        ]
        found = [OUTCOME.validate_python(each) for each in self.executor.map(run_trial, jobs)]
        self.charge(kind, *(job.recipe for job in jobs), units=units)
        return found

    def build(self, candidate: SearchCandidate) -> BuiltArtifact:
        """Build the artifact of a candidate that has been through a trial."""
        assert candidate.quality is not None
        with self.steps.step(f"build: {candidate.name}") as step:
            made = build_candidate(
                self.recipe_of(candidate),
                self.context,
                candidate.quality,
                self.constraints,
                trust=self.trust,
                steps=Steps(quiet=True),
                cache=self.cache,
            )
            verdict = describe_misses(self.constraints, made) or "goal met"
            step.note = f"{made.speedup:.2f} x, fidelity {made.quality.fidelity:.4f}; {verdict}"
        self.charge("build", self.recipe_of(candidate).model_dump_json())
        return made

    def recipe_of(self, candidate: SearchCandidate) -> Recipe:
        """The recipe that makes a candidate."""
        return apply_settings(self.recipe, candidate.settings, candidate.heals)

    def has_time_for(self, kind: str, units: float = 1, *, build: bool = False) -> bool:
        """Whether the budget allows for more of a kind of work. build: and for building an artifact afterwards."""
        return self.budget.allows(kind, units, keep=self.budget.estimate("build") or 0.0 if build else 0.0)

    def charge(self, kind: str, *parts: str, units: float = 1) -> None:
        """Charge the time since the last charge to the budget. parts: what identifies the piece of work."""
        self.budget.charge(hash_of("lap", self.context.key, kind, parts), kind, units)
