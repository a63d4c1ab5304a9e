"""A candidate of a search: its settings, predictions and measurements, and the reason for its rejection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compress.search.constraints import Constraints, Quality
from compress.search.results import BuiltArtifact, CostPrediction, TrialOutcome
from compress.search.search_space import describe_settings
from laconic.timing.measurements import TrialRecord
from laconic.units import format_bytes, format_seconds


@dataclass(eq=False)
class SearchCandidate:
    """A candidate that is predicted, pruned, healed, built, or rejected on the way.

    settings: of the pruning stages. heals: training steps of each healing so far. outcome: of pruning and healing so
    far. unhealed: the quality before any healing. shortfall: the ratio of the lost quality to the allowed loss.
    remaining_share: the share that the last healing left of the shortfall or of the infidelity, whichever is less
    (correct answers come and go by ones). built: its artifact. failed_infidelity: the infidelity when an artifact of it
    failed. reason: why it was rejected; empty otherwise.
    """

    settings: Mapping[str, float]
    prediction: CostPrediction
    heals: tuple[int, ...] = ()
    outcome: TrialOutcome = field(default_factory=TrialOutcome)
    unhealed: Quality | None = None
    shortfall: float = float("inf")
    remaining_share: float = 0.0
    built: BuiltArtifact | None = None
    failed_infidelity: float = float("inf")
    reason: str = ""

    @property
    def name(self) -> str:
        """The settings and the healing, for people."""
        healed = f", healed {sum(self.heals)} steps" if self.heals else ""
        return describe_settings(self.settings) + healed

    @property
    def quality(self) -> Quality | None:
        """The latest quality: of the artifact, or of the model before quantization."""
        return self.built.quality if self.built else self.outcome.quality

    @property
    def infidelity(self) -> float:
        """1 minus the fidelity before quantization; infinite before the first trial."""
        return 1 - self.outcome.quality.fidelity if self.outcome.quality else float("inf")

    def dominates(self, other: "SearchCandidate") -> bool:
        """Whether it is predicted to be at least as fast, had at least the fidelity before healing, and one is more."""
        if self.unhealed is None or other.unhealed is None:
            return False
        mine = (self.prediction.speedup, self.unhealed.fidelity)
        theirs = (other.prediction.speedup, other.unhealed.fidelity)
        return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))

    def is_more_aggressive(self, other: "SearchCandidate") -> bool:
        """Whether it is predicted to be no slower, and had no higher fidelity before healing."""
        if self.unhealed is None or other.unhealed is None:
            return False
        return self.prediction.speedup >= other.prediction.speedup and self.unhealed.fidelity <= other.unhealed.fidelity

    def update(self, outcome: TrialOutcome, constraints: Constraints) -> None:
        """Take in the outcome of pruning, or of one more healing."""
        before, self.outcome = self.quality, outcome
        if outcome.quality is None:
            self.reason = self.reason or outcome.error
            return
        shortfall = constraints.shortfall(outcome.quality)
        if before is not None:
            infidelity = share_of(1 - outcome.quality.fidelity, 1 - before.fidelity)
            self.remaining_share = min(share_of(shortfall, self.shortfall), infidelity)
        self.shortfall = shortfall
        self.unhealed = self.unhealed or outcome.quality

    @property
    def objectives(self) -> tuple[float, float] | None:
        """What the study minimizes: infidelity before healing and relative time; None before the first trial."""
        return None if self.unhealed is None else (1 - self.unhealed.fidelity, 1 / self.prediction.speedup)

    def explain_loss(
        self, best: "SearchCandidate", front: Sequence["SearchCandidate"], constraints: Constraints
    ) -> str:
        """Why a candidate that was not rejected was not taken. front: of the unhealed candidates."""
        rank = "faster" if constraints.prefers_speed else "better"
        if self.built:
            return describe_misses(constraints, self.built) or f"{best.name} is {rank}"
        dominating = next((each for each in front if each.dominates(self)), None)
        if dominating is not None:
            return f"{describe_settings(dominating.settings)} is as fast, and was more faithful when it was cut"
        missed = describe_infidelity(constraints, self.quality)
        return f"{missed}; not healed further" if missed else f"{best.name} is {rank}"

    def make_record(self, reason: str) -> TrialRecord:
        """The record for the report. reason: why it was taken, or not."""
        made, found = self.built or self.prediction, self.quality
        return TrialRecord(
            name=self.name,
            settings=dict(self.settings),
            heal=sum(self.heals),
            fidelity=found.fidelity if found else None,
            drop=found.drop if found else None,
            latency=made.latency,
            size=max(made.size, 0.0),
            speedup=made.speedup,
            measured=self.built is not None,
            foretold=self.prediction.speedup if self.built and self.settings else None,
            reason=reason,
        )


def share_of(now: float, before: float) -> float:
    """The share that is left of a number; 1 where there was none."""
    return now / before if before > 0 else 1.0


def describe_excess(constraints: Constraints, made: BuiltArtifact | CostPrediction) -> str:
    """The limits on latency and size that are exceeded, in words; empty where none is."""
    word = "" if isinstance(made, BuiltArtifact) else "predicted "
    found = []
    if constraints.max_latency is not None and made.latency > constraints.max_latency:
        found.append(f"{word}{format_seconds(made.latency)}, the goal is {format_seconds(constraints.max_latency)}")
    if constraints.max_size is not None and made.size > constraints.max_size:
        found.append(f"{word}{format_bytes(made.size)}, the goal is {format_bytes(constraints.max_size)}")
    return "; ".join(found)


def describe_infidelity(constraints: Constraints, found: Quality | None) -> str:
    """The quality that is missing, in words; empty where the constraints are met, and before the first trial."""
    if found is None or constraints.shortfall(found) <= 1:
        return ""
    limit, drop = constraints.max_drop, found.cautious_drop
    if limit is not None and found.drop is not None and drop is not None and drop > limit:
        return f"drop {found.drop:.2%}, {drop:.2%} with the margin for its uncertainty, the goal is {limit:.2%}"
    assert constraints.tolerance is not None
    asked = constraints.tolerance.describe()
    return f"fidelity {found.fidelity:.4f}, worst {found.worst:.4f}, asked for {asked}"


def describe_misses(constraints: Constraints, made: BuiltArtifact) -> str:
    """Everything that an artifact misses, in words; empty where it meets the goal."""
    missing = [describe_excess(constraints, made), describe_infidelity(constraints, made.quality), *made.failures]
    if constraints.strict:
        missing += made.doubts
    return "; ".join(dict.fromkeys(each for each in missing if each))


def is_better(constraints: Constraints, made: BuiltArtifact, other: BuiltArtifact | None) -> bool:
    """Whether an artifact replaces another one.

    One that meets the goal is better than one that does not. Of two that meet it the faster, or the more faithful, is
    better, as the constraints prefer; of two that miss it, the nearer.
    """
    if other is None:
        return True
    misses = [bool(describe_misses(constraints, each)) for each in (made, other)]
    if misses[0] != misses[1]:
        return misses[1]
    if misses[0]:
        far, further = (
            max(constraints.shortfall(each.quality), constraints.excess(each.latency, each.size))
            for each in (made, other)
        )
        return far < further
    if constraints.prefers_speed:
        # Each was timed in turns with the original. Seconds of two moments do not compare: where the machine had become
        # slower in between, a network of 6.2 x lost to one of 5.3 x.
        return made.speedup > other.speedup
    return made.quality.fidelity > other.quality.fidelity


def unhealed_front(candidates: Sequence[SearchCandidate]) -> list[SearchCandidate]:
    """The Pareto front over predicted speed and fidelity before healing."""
    return [each for each in candidates if not any(other.dominates(each) for other in candidates)]
