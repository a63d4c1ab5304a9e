"""Where candidates are worked on, each piece of work charged to the budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.search.budget import Budget
from compress.search.constraints import Aim
from compress.search.executor import Executor
from compress.search.finish import Built, build
from compress.search.search_candidate import Candidate, wrong
from compress.search.space import with_settings
from compress.search.trial import OUTCOME, Ground, Job, Outcome, attempt
from laconic.cache import Cache
from laconic.hashing import hash_of
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe


@dataclass
class Workshop:
    """recipe: what is asked. base: the source and the samples. The rest as `solve` takes it."""

    recipe: Recipe
    base: Ground
    aim: Aim
    budget: Budget
    executor: Executor
    trust: bool
    steps: Steps
    cache: Cache

    def tried(self, group: Sequence[Candidate], kind: str = "cut", units: float = 1) -> list[Outcome]:
        """What comes of cutting and healing each, from the cache or from the workers. kind, units: for the budget."""
        jobs = [
            Job(self.made_by(each).model_dump_json(), self.trust, str(self.cache.folder), torch.get_num_threads())
            for each in group
        ]
        found = [OUTCOME.validate_python(each) for each in self.executor.map(attempt, jobs)]
        self.charge(kind, *(job.recipe for job in jobs), units=units)
        return found

    def build(self, candidate: Candidate) -> Built:
        """The artifact of a candidate that was tried."""
        assert candidate.figures is not None
        with self.steps.step(f"build: {candidate.name}") as step:
            made = build(
                self.made_by(candidate),
                self.base,
                candidate.figures,
                self.aim,
                trust=self.trust,
                steps=Steps(quiet=True),
                cache=self.cache,
            )
            said = wrong(self.aim, made) or "goal met"
            step.note = f"{made.speedup:.2f} x, fidelity {made.figures.fidelity:.4f}; {said}"
        self.charge("build", self.made_by(candidate).model_dump_json())
        return made

    def made_by(self, candidate: Candidate) -> Recipe:
        """The recipe that makes a candidate."""
        return with_settings(self.recipe, candidate.settings, candidate.heals)

    def time_for(self, kind: str, units: float = 1, *, build: bool = False) -> bool:
        """Whether there is time for more of a kind of work. build: and for an artifact of what comes of it."""
        return self.budget.allows(kind, units, keep=self.budget.expected("build") or 0.0 if build else 0.0)

    def charge(self, kind: str, *parts: str, units: float = 1) -> None:
        """The budget, with what went by since it was charged last, for a piece of work that the parts name."""
        self.budget.lap(hash_of("lap", self.base.key, kind, parts), kind, units)
