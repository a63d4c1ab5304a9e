"""The time budget of a search, shared by all of its interrupted and resumed runs, and the work charged to it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compress.search.constraints import Constraints, Quality
from compress.search.executor import Executor, SearchContext
from compress.search.search_candidate import BuiltArtifact, SearchCandidate, TrialOutcome, describe_misses
from compress.search.search_space import apply_settings
from laconic.cache import Cache
from laconic.hashing import hash_of
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe


class Budget:
    """A budget in seconds. Each piece of work is charged the time that it took when it was first done.

    A resumed search is charged for cached work what the interrupted run was charged for it. Both therefore make the
    same decisions, and an interruption buys no time. spent: seconds so far. is_fresh: whether the last piece of work
    was done in this run, and not found in the cache.
    """

    def __init__(self, seconds: float, cache: Cache, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.spent = 0.0
        self.is_fresh = False
        self._cache = cache
        self._clock = clock
        self._mark = clock()
        self._rates: dict[str, float] = {}

    def charge(self, key: str, kind: str = "", units: float = 1) -> float:
        """Charge the seconds since the last call, or those that an earlier run was charged for the work `key`.

        kind, units: the kind of work and its amount, for `estimate`. Returns the seconds.
        """
        now = self._clock()
        self.is_fresh = False

        def measure() -> float:
            self.is_fresh = True
            return now - self._mark

        seconds = float(self._cache.json(f"lap-{key}", measure))
        self._mark = now
        self.spent += seconds
        if kind:
            self._rates[kind] = seconds / units
        return seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left; negative beyond the budget."""
        return self.seconds - self.spent

    @property
    def overrun(self) -> float:
        """Seconds beyond the budget."""
        return max(-self.remaining, 0.0)

    def estimate(self, kind: str, units: float = 1) -> float | None:
        """Estimate the seconds for an amount of a kind of work from the last of its kind; None before the first."""
        return self._rates[kind] * units if kind in self._rates else None

    def allows(self, kind: str, units: float = 1, *, keep: float = 0.0) -> bool:
        """Whether the budget has time for an amount of a kind of work and `keep` seconds beyond it.

        Work of a kind that was never done before is allowed as long as any time is left.
        """
        return self.remaining > keep + (self.estimate(kind, units) or 0.0)


@dataclass(frozen=True)
class TrialRunner:
    """Runs trials and builds artifacts for a search, and charges the time to its budget.

    recipe: the user's. run_trial, build_artifact: evaluate a candidate's recipe; the latter is given the quality before
    quantization.
    """

    recipe: Recipe
    context: SearchContext
    budget: Budget
    executor: Executor
    steps: Steps
    run_trial: Callable[[SearchContext, Recipe], TrialOutcome]
    build_artifact: Callable[[SearchContext, Recipe, Quality, Constraints], BuiltArtifact]

    def run_trials(self, group: Sequence[SearchCandidate], kind: str = "cut", units: float = 1) -> list[TrialOutcome]:
        """Prune and heal each candidate, in the workers or from the cache. kind, units: for the budget."""
        recipes = [self.make_recipe(candidate) for candidate in group]
        outcomes = list(self.executor.map(self.run_trial, recipes))
        self.charge(kind, *(recipe.model_dump_json() for recipe in recipes), units=units)
        return outcomes

    def build(self, candidate: SearchCandidate, constraints: Constraints) -> BuiltArtifact:
        """Build the artifact of a candidate that has been through a trial."""
        assert candidate.quality is not None
        recipe = self.make_recipe(candidate)
        with self.steps.step(f"build: {candidate.name}") as step:
            built = self.build_artifact(self.context, recipe, candidate.quality, constraints)
            verdict = describe_misses(constraints, built) or "goal met"
            step.note = f"{built.speedup:.2f} x, fidelity {built.quality.fidelity:.4f}; {verdict}"
        self.charge("build", recipe.model_dump_json())
        return built

    def make_recipe(self, candidate: SearchCandidate) -> Recipe:
        """Make the recipe of a candidate."""
        return apply_settings(self.recipe, candidate.settings, candidate.heals)

    def has_time_for(self, kind: str, units: float = 1, *, build: bool = False) -> bool:
        """Whether the budget allows for more of a kind of work, and for the verdict of the best artifact, which takes
        as long as building it. build: and for building an artifact afterwards."""
        return self.budget.allows(kind, units, keep=(1 + build) * (self.budget.estimate("build") or 0.0))

    def charge(self, kind: str, *parts: str, units: float = 1) -> None:
        """Charge the time since the last charge to the budget. parts: what identifies the piece of work."""
        self.budget.charge(hash_of("lap", self.context.key, kind, parts), kind, units)
