"""The state of a search, a value: every candidate, the best one so far, and the Pareto front of the trials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from compress.search.constraints import Constraints
from compress.search.latency_model import LatencyModel
from compress.search.search_candidate import (
    BuiltArtifact,
    SearchCandidate,
    describe_excess,
    describe_misses,
    dominates,
    is_better,
)
from compress.search.search_space import describe_settings
from laconic.timing.measurements import TrialRecord

MIN_GAIN = 1.05
"""How many times faster than the best one a candidate must be predicted to be, to be worth more work."""


@dataclass(frozen=True)
class SearchState:
    """All candidates of a search, by key.

    best: the candidate whose artifact is at the destination, or about to be written there, as it was when that was
    built. latency_model: None before the first artifact, and where nothing can be pruned.
    """

    constraints: Constraints
    candidates: Mapping[str, SearchCandidate] = field(default_factory=dict)
    best: SearchCandidate | None = None
    latency_model: LatencyModel | None = None

    def put(self, *candidates: SearchCandidate) -> "SearchState":
        """Return the state with these candidates added, or in the place of those with the same keys."""
        return replace(self, candidates={**self.candidates, **{candidate.key: candidate for candidate in candidates}})

    def take_artifact(self, candidate: SearchCandidate, built: BuiltArtifact) -> "SearchState":
        """Return the state with the artifact of a candidate, which may be the best one now."""
        candidate, model = replace(candidate, built=built), self.latency_model
        return replace(
            self.put(candidate),
            best=candidate if is_better(self.constraints, built, self.best_artifact) else self.best,
            latency_model=model.fit(candidate.outcome.specs, built) if model else None,
        )

    def latest(self, candidates: Sequence[SearchCandidate]) -> list[SearchCandidate]:
        """Return these candidates as they are now."""
        return [self.candidates[candidate.key] for candidate in candidates]

    @property
    def baseline(self) -> SearchCandidate:
        """The candidate in which nothing is pruned."""
        return self.candidates[describe_settings({})]

    @property
    def best_artifact(self) -> BuiltArtifact | None:
        """The artifact of the best candidate; None before the first."""
        return self.best.built if self.best else None

    @property
    def work(self) -> int:
        """The number of prunings, healings and artifacts so far."""
        return sum(
            (candidate.unhealed is not None) + len(candidate.heals) + (candidate.built is not None)
            for candidate in self.candidates.values()
        )

    @property
    def tried(self) -> int:
        """The number of settings that were tried."""
        return sum(candidate.is_tried for candidate in self.candidates.values())

    @property
    def is_goal_met(self) -> bool:
        """Whether the best artifact meets the goal."""
        return self.best_artifact is not None and not describe_misses(self.constraints, self.best_artifact)

    @property
    def open_candidates(self) -> list[SearchCandidate]:
        """The candidates that were pruned and not rejected."""
        return [each for each in self.candidates.values() if each.unhealed and each.settings and not each.reason]

    def is_worth_work(self, candidate: SearchCandidate) -> bool:
        """Whether a candidate's predicted speed is worth more work."""
        best = self.best_artifact
        if best is None or not (self.constraints.prefers_speed and self.is_goal_met):
            return True
        return candidate.prediction.speedup > MIN_GAIN * best.speedup

    def screen(self, candidate: SearchCandidate) -> SearchCandidate:
        """Reject a candidate that is predicted to be too slow, too large, or no faster than the best one."""
        candidate = candidate.reject(describe_excess(self.constraints, candidate.prediction))
        if self.is_worth_work(candidate):
            return candidate
        best = self.best.name if self.best else ""
        return candidate.reject(f"predicted {candidate.prediction.speedup:.2f} x: {best} is as fast, with less cut")

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """A record of every candidate, each with the reason why it was taken or not; none before the first artifact."""
        if self.best is None:
            return ()
        front = find_front(self.open_candidates)
        records = [self.best.make_record("taken" if self.is_goal_met else "taken: the nearest to the goal")]
        for candidate in self.candidates.values():
            if candidate.name != self.best.name:
                reason = candidate.reason or candidate.explain_loss(self.best, front, self.constraints)
                records.append(candidate.make_record(reason))
        return mark_front(records)


def find_front(candidates: Sequence[SearchCandidate]) -> list[SearchCandidate]:
    """Find the Pareto front over predicted time and infidelity before healing."""
    return [
        candidate
        for candidate in candidates
        if not any(dominates(other.objectives, candidate.objectives) for other in candidates)
    ]


def find_objectives(trial: TrialRecord) -> tuple[float, ...]:
    """Return the minimized objectives of a trial: the divergence of models that write, else the drop (the infidelity
    without labels), latency and size."""
    losses = (trial.divergence, trial.drop, 1 - (trial.fidelity or 0.0))
    return next(loss for loss in losses if loss is not None), trial.latency, trial.size


def mark_front(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Mark the trials on the Pareto front, measured ones first, then by latency.

    Trials that were only predicted are never on the front.
    """
    points = [find_objectives(trial) for trial in trials if trial.measured]
    marked: list[TrialRecord] = []
    for trial in trials:
        is_dominated = any(dominates(point, find_objectives(trial)) for point in points)
        marked.append(trial.model_copy(update={"front": trial.measured and not is_dominated}))
    return tuple(sorted(marked, key=lambda trial: (not trial.measured, trial.latency, trial.name)))
