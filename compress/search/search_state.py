"""The state of a search: every candidate, and the best one so far."""

from collections.abc import Callable, Sequence

from compress.search.constraints import Constraints
from compress.search.latency_model import LatencyModel
from compress.search.pareto import mark_front
from compress.search.search_candidate import (
    SearchCandidate,
    describe_excess,
    describe_misses,
    is_better,
    unhealed_front,
)
from compress.search.trial_runner import TrialRunner
from laconic.timing.measurements import TrialRecord

MIN_GAIN = 1.05
"""How many times faster than the best one a candidate must be predicted to be, to be worth more work."""

Publish = Callable[[SearchCandidate, Sequence[TrialRecord]], None]


class SearchState:
    """All candidates of a search.

    publish: writes a candidate's artifact to the destination, with the trials so far. best: the candidate whose
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
    def work(self) -> int:
        """The number of prunings, healings and builds so far."""
        every = self.candidates.values()
        return sum((each.unhealed is not None) + len(each.heals) + (each.built is not None) for each in every)

    @property
    def is_goal_met(self) -> bool:
        """Whether the best artifact meets the goal."""
        best = self.best.built if self.best else None
        return best is not None and not describe_misses(self.constraints, best)

    @property
    def open_candidates(self) -> list[SearchCandidate]:
        """The candidates that were pruned and not rejected."""
        return [each for each in self.candidates.values() if each.unhealed and each.settings and not each.reason]

    def is_worth_work(self, candidate: SearchCandidate) -> bool:
        """Whether a candidate's predicted speed is worth more work."""
        if not (self.constraints.prefers_speed and self.is_goal_met):
            return True
        assert self.best is not None
        assert self.best.built is not None
        return candidate.prediction.speedup > MIN_GAIN * self.best.built.speedup

    def reject_if_too_costly(self, candidate: SearchCandidate) -> None:
        """Reject a candidate that is predicted to be too slow, too large, or no faster than the best one."""
        candidate.reason = candidate.reason or describe_excess(self.constraints, candidate.prediction)
        if not candidate.reason and not self.is_worth_work(candidate):
            best = self.best.name if self.best else ""
            candidate.reason = f"predicted {candidate.prediction.speedup:.2f} x: {best} is as fast, with less cut"

    def predict(self, candidate: SearchCandidate) -> None:
        """Repeat the prediction for a pruned candidate, from the layers that it really has."""
        assert self.latency_model is not None
        if candidate.unhealed is not None and candidate.outcome is not None:
            candidate.prediction = self.latency_model.predict(candidate.outcome.specs, candidate.outcome.size)
            self.reject_if_too_costly(candidate)

    def build(self, candidate: SearchCandidate) -> None:
        """Build a candidate's artifact, and publish the best one."""
        candidate.built = self.runner.build(candidate)
        if self.latency_model is not None:
            assert candidate.outcome is not None
            self.latency_model.fit(candidate.outcome.specs, candidate.built)
        if is_better(self.constraints, candidate.built, self.best.built if self.best else None):
            self.best = candidate
        if self.runner.budget.is_fresh:  # else an earlier run did this, and its best artifact is at the destination
            self.publish()

    def publish(self) -> None:
        """Write the best artifact to the destination, with the trials so far."""
        assert self.best is not None
        self._publish(self.best, self.trials)

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """A record of every candidate, each with the reason why it was taken or not."""
        assert self.best is not None
        front = unhealed_front(self.open_candidates)
        records = [self.best.make_record("taken" if self.is_goal_met else "taken: the nearest to the goal")]
        for each in self.candidates.values():
            if each is not self.best:
                reason = each.reason or each.explain_loss(self.best, front, self.constraints)
                records.append(each.make_record(reason))
        return mark_front(records)
