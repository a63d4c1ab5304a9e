"""The state of a search: every candidate, the best one so far, and the Pareto front of the trials."""

from collections.abc import Callable, Sequence

from compress.search.constraints import Constraints
from compress.search.latency_model import LatencyModel
from compress.search.results import BuiltArtifact
from compress.search.search_candidate import (
    SearchCandidate,
    describe_excess,
    describe_misses,
    is_better,
    unhealed_front,
)
from compress.search.search_space import describe_settings
from compress.search.trial_runner import TrialRunner
from laconic.timing.measurements import TrialRecord

MIN_GAIN = 1.05
"""How many times faster than the best one a candidate must be predicted to be, to be worth more work."""

Publish = Callable[[BuiltArtifact, Sequence[TrialRecord]], None]


class SearchState:
    """All candidates of a search.

    publish: writes an artifact to the destination, with the trials so far. best: the candidate whose
    artifact is at the destination, or about to be written there. latency_model: None before the first artifact, and
    where nothing can be pruned.
    """

    def __init__(self, runner: TrialRunner, publish: Publish) -> None:
        self.runner = runner
        self.best: SearchCandidate | None = None
        self.candidates: dict[str, SearchCandidate] = {}
        self.latency_model: LatencyModel | None = None
        self._publish = publish

    @property
    def constraints(self) -> Constraints:
        """The constraints that candidates must satisfy."""
        return self.runner.constraints

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
        """The number of prunings, healings and builds so far."""
        every = self.candidates.values()
        return sum((each.unhealed is not None) + len(each.heals) + (each.built is not None) for each in every)

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

    def reject_if_too_costly(self, candidate: SearchCandidate) -> None:
        """Reject a candidate that is predicted to be too slow, too large, or no faster than the best one."""
        candidate.reason = candidate.reason or describe_excess(self.constraints, candidate.prediction)
        if not candidate.reason and not self.is_worth_work(candidate):
            best = self.best.name if self.best else ""
            candidate.reason = f"predicted {candidate.prediction.speedup:.2f} x: {best} is as fast, with less cut"

    def build(self, candidate: SearchCandidate) -> BuiltArtifact:
        """Build a candidate's artifact, and publish the best one. Returns the candidate's."""
        candidate.built = built = self.runner.build(candidate)
        if self.latency_model is not None:
            self.latency_model.fit(candidate.outcome.specs, built)
        if is_better(self.constraints, built, self.best_artifact):
            self.best = candidate
        if self.runner.budget.is_fresh:  # else an earlier run did this, and its best artifact is at the destination
            self.publish()
        return built

    def publish(self) -> None:
        """Write the best artifact to the destination, with the trials so far."""
        if self.best_artifact is not None:
            self._publish(self.best_artifact, self.trials)

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """A record of every candidate, each with the reason why it was taken or not; none before the first artifact."""
        if self.best is None:
            return ()
        front = unhealed_front(self.open_candidates)
        records = [self.best.make_record("taken" if self.is_goal_met else "taken: the nearest to the goal")]
        for each in self.candidates.values():
            if each is not self.best:
                reason = each.reason or each.explain_loss(self.best, front, self.constraints)
                records.append(each.make_record(reason))
        return mark_front(records)


def objectives(trial: TrialRecord) -> tuple[float, ...]:
    """The minimized objectives: the drop (the infidelity without labels), latency and size."""
    loss = trial.drop if trial.drop is not None else 1 - (trial.fidelity or 0.0)
    return loss, trial.latency, trial.size


def dominates(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether one trial is worse in no objective and better in at least one."""
    pairs = list(zip(objectives(one), objectives(other), strict=True))
    return all(mine <= theirs for mine, theirs in pairs) and any(mine < theirs for mine, theirs in pairs)


def mark_front(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The trials with those on the Pareto front marked, measured ones first, then by latency.

    Trials that were only predicted are never on the front.
    """
    measured = [trial for trial in trials if trial.measured]
    marked = [
        trial.model_copy(update={"front": trial.measured and not any(dominates(other, trial) for other in measured)})
        for trial in trials
    ]
    return tuple(sorted(marked, key=lambda trial: (not trial.measured, trial.latency, trial.name)))
