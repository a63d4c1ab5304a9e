"""A candidate of a search, a value: its settings, predictions and measurements, and the reason for its rejection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compress.search.constraints import Constraints, Quality
from compress.search.layer_spec import LayerSpec
from compress.search.search_space import describe_settings
from laconic.quantization.plan import Precision
from laconic.runtimes.runtime import Compute
from laconic.timing.measurements import TrialRecord


@dataclass(frozen=True)
class CostPrediction:
    """latency: seconds for one sample. speedup: over the original. size: bytes. first_token, tokens_per_second: of
    models that write, as in Costs."""

    latency: float
    speedup: float
    size: float
    first_token: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial.

    quality: on the samples used for selection. specs: the layers that are left. size: bytes of their weights in INT8.
    error: why there is no result, in a sentence.
    """

    quality: Quality | None = None
    specs: tuple[LayerSpec, ...] = ()
    size: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class BuiltArtifact:
    """An artifact in the cache, with its measurements.

    folder: where it is. recipe: what it was made by, as JSON. runtime: the engine. compute: the arithmetic of layers
    that are not quantized. precision: of most layers. quality: on the samples used for selection. latency: seconds for
    one sample. size: bytes. speedup: over the original, at the batch sizes of a trial. costs: processor seconds of a
    run, by batch size. failures: the misses of the goal, also by its verdict on the test samples. doubts: what the goal
    asks for and these samples leave in doubt. first_token, tokens_per_second: of models that write, as in Costs.
    """

    folder: str
    recipe: str
    runtime: str
    compute: Compute
    precision: Precision
    quality: Quality
    latency: float
    size: float
    speedup: float
    costs: Mapping[int, float]
    failures: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    first_token: float | None = None
    tokens_per_second: float | None = None

    @property
    def kernels(self) -> tuple[str, Compute, Precision]:
        """What decides which kernels run its layers."""
        return self.runtime, self.compute, self.precision


@dataclass(frozen=True)
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
    outcome: TrialOutcome = TrialOutcome()
    unhealed: Quality | None = None
    shortfall: float = float("inf")
    remaining_share: float = 0.0
    built: BuiltArtifact | None = None
    failed_infidelity: float = float("inf")
    reason: str = ""

    @property
    def key(self) -> str:
        """The settings for people, which identify the candidate, however it is healed."""
        return describe_settings(self.settings)

    @property
    def name(self) -> str:
        """The settings and the healing, for people."""
        return self.key + (f", healed {sum(self.heals)} steps" if self.heals else "")

    @property
    def quality(self) -> Quality | None:
        """The latest quality: of the artifact, or of the model before quantization."""
        return self.built.quality if self.built else self.outcome.quality

    @property
    def infidelity(self) -> float:
        """1 minus the fidelity before quantization; infinite before the first trial."""
        return 1 - self.outcome.quality.fidelity if self.outcome.quality else float("inf")

    @property
    def objectives(self) -> tuple[float, float] | None:
        """What the study minimizes: infidelity before healing and relative time; None before the first trial."""
        return None if self.unhealed is None else (1 - self.unhealed.fidelity, 1 / self.prediction.speedup)

    @property
    def is_tried(self) -> bool:
        """Whether its settings have been tried, with or without success."""
        return bool(self.settings) and self.outcome != TrialOutcome()

    def is_more_aggressive(self, other: "SearchCandidate") -> bool:
        """Whether it is predicted to be no slower, and had no higher fidelity before healing."""
        if self.unhealed is None or other.unhealed is None:
            return False
        return self.prediction.speedup >= other.prediction.speedup and self.unhealed.fidelity <= other.unhealed.fidelity

    def reject(self, reason: str) -> "SearchCandidate":
        """Return the candidate with a reason against it; the first one stays."""
        return replace(self, reason=self.reason or reason)

    def start_healing(self, steps: int, *, refuted: bool) -> "SearchCandidate":
        """Return the candidate without its artifact, to be healed further. refuted: whether that artifact failed."""
        failed = self.infidelity if refuted and self.built else self.failed_infidelity
        return replace(self, heals=(*self.heals, steps), built=None, failed_infidelity=failed)

    def take_outcome(self, outcome: TrialOutcome, constraints: Constraints) -> "SearchCandidate":
        """Return the candidate with the outcome of pruning, or of one more healing."""
        if outcome.quality is None:
            return replace(self, outcome=outcome).reject(outcome.error)
        shortfall, remaining = constraints.shortfall(outcome.quality), self.remaining_share
        if self.quality is not None:
            infidelity = share_of(1 - outcome.quality.fidelity, 1 - self.quality.fidelity)
            remaining = min(share_of(shortfall, self.shortfall), infidelity)
        return replace(
            self,
            outcome=outcome,
            unhealed=self.unhealed or outcome.quality,
            shortfall=shortfall,
            remaining_share=remaining,
        )

    def explain_loss(
        self, best: "SearchCandidate", front: Sequence["SearchCandidate"], constraints: Constraints
    ) -> str:
        """Explain why a candidate that was not rejected was not taken. front: of the unhealed candidates."""
        rank = "faster" if constraints.prefers_speed else "better"
        if self.built:
            return describe_misses(constraints, self.built) or f"{best.name} is {rank}"
        dominating = next((other for other in front if dominates(other.objectives, self.objectives)), None)
        if dominating is not None:
            return f"{dominating.key} is as fast, and was more faithful when it was cut"
        missed = constraints.describe_infidelity(self.quality)
        return f"{missed}; not healed further" if missed else f"{best.name} is {rank}"

    def make_record(self, reason: str) -> TrialRecord:
        """Make the record for the report. reason: why it was taken, or not."""
        costs, quality = self.built or self.prediction, self.quality
        return TrialRecord(
            name=self.name,
            settings=dict(self.settings),
            heal=sum(self.heals),
            fidelity=quality.fidelity if quality else None,
            drop=quality.drop if quality else None,
            latency=costs.latency,
            size=max(costs.size, 0.0),
            speedup=costs.speedup,
            divergence=quality.divergence if quality else None,
            first_token=costs.first_token,
            tokens_per_second=costs.tokens_per_second,
            measured=self.built is not None,
            foretold=self.prediction.speedup if self.built and self.settings else None,
            reason=reason,
        )


def share_of(now: float, before: float) -> float:
    """Return the share that is left of a number; 1 where there was none."""
    return now / before if before > 0 else 1.0


def describe_excess(constraints: Constraints, costs: BuiltArtifact | CostPrediction) -> str:
    """Describe the limits on costs that are exceeded; empty where none is."""
    word = "" if isinstance(costs, BuiltArtifact) else "predicted "
    return constraints.describe_excess(costs, word)


def describe_misses(constraints: Constraints, artifact: BuiltArtifact) -> str:
    """Describe everything that an artifact misses; empty where it meets the goal."""
    misses = [describe_excess(constraints, artifact), constraints.describe_infidelity(artifact.quality)]
    misses += [*artifact.failures, *(artifact.doubts if constraints.strict else ())]
    return "; ".join(dict.fromkeys(miss for miss in misses if miss))


def is_better(constraints: Constraints, artifact: BuiltArtifact, other: BuiltArtifact | None) -> bool:
    """Whether an artifact replaces another one.

    One that meets the goal is better than one that does not. Of two that meet it the faster, or the one that loses
    less, is better, as the constraints prefer; of two that miss it, the nearer.
    """
    if other is None:
        return True
    misses, others_misses = (bool(describe_misses(constraints, each)) for each in (artifact, other))
    if misses != others_misses:
        return others_misses
    if misses:
        distance, others_distance = (
            max(constraints.shortfall(each.quality), constraints.excess(each)) for each in (artifact, other)
        )
        return distance < others_distance
    if constraints.prefers_speed:
        # Each was timed in turns with the original. Seconds of two moments do not compare: where the machine had become
        # slower in between, a network of 6.2 x lost to one of 5.3 x.
        return artifact.speedup > other.speedup
    return artifact.quality.loss < other.quality.loss


def dominates(one: tuple[float, ...] | None, other: tuple[float, ...] | None) -> bool:
    """Whether one point is worse in no objective, which are minimized, and better in at least one."""
    if one is None or other is None:
        return False
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
