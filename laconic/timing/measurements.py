"""The measurements in an artifact: timings, the machine, durations, and the trials of a search."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from laconic.hardware import Machine
from laconic.runtimes.product import NOT_AUDITED, NOT_COUNTED, NOT_REPORTED, Product, share_multiply_adds
from laconic.units import format_bytes, format_fidelity

ORIGINAL = "original"
"""The name of the source among the timings."""

FASTER = 1.05
"""How many times as fast a draft model must make lone answers."""

DEFAULT_KNEE = 8
"""The batch size, in rows, that a server goes up to where nothing was timed."""


class Timing(BaseModel):
    """The timing of one model at one batch size, interleaved with the other models.

    engine: the engine and its arithmetic, or "original". batch: rows. length: size of the longest dynamic axis (tokens,
    pixels; 0 if there is none). seconds: median per run, with its quartiles. speedup: the median over rounds of the
    original's time divided by this one's, with its quartiles.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    engine: str
    batch: PositiveInt
    length: NonNegativeInt
    threads: PositiveInt
    seconds: PositiveFloat
    quartiles: tuple[PositiveFloat, PositiveFloat]
    speedup: NonNegativeFloat
    speedup_quartiles: tuple[NonNegativeFloat, NonNegativeFloat]

    @property
    def rows_per_second(self) -> float:
        """Throughput, in rows per second."""
        return self.batch / self.seconds


class WritingSpeed(BaseModel):
    """How fast one model writes a lone answer, interleaved with the other models.

    engine: as of a Timing. prompt: tokens. first_token: seconds to the first token, the median. tokens_per_second: of
    the tokens behind the first, the median.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    engine: str
    prompt: NonNegativeInt
    first_token: PositiveFloat
    tokens_per_second: PositiveFloat


class DraftTrial(BaseModel):
    """How fast an artifact wrote lone answers with a draft model and without, in interleaved rounds.

    draft: the name of the draft's artifact. prompts: how many were answered; same: how many texts were the same.
    tokens: the most of an answer. drafted, accepted: tokens that were proposed, by the draft model or from the text
    itself, and those that the model chose, too. tokens_per_second: behind the first, medians over rounds: `plain`
    without the draft model, `drafted` with it, and `paged` where the engine with paged attention takes the model.
    ratio: of `drafted` to `plain`, the median over rounds, with its quartiles; paged_ratio: to `paged`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    draft: str
    prompts: PositiveInt
    same: NonNegativeInt
    tokens: PositiveInt
    drafted: NonNegativeInt
    accepted: NonNegativeInt
    tokens_per_second: dict[str, PositiveFloat]
    ratio: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
    paged_ratio: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = None

    @property
    def is_faster(self) -> bool:
        """Whether the draft model is worth its place: the same texts, faster by a margin in three of four rounds."""
        return self.same == self.prompts and self.ratio[0] > FASTER

    @property
    def beats_paged(self) -> bool:
        """Whether texts also came faster than from paged attention."""
        return self.is_faster and self.paged_ratio is not None and self.paged_ratio[0] > FASTER

    def describe(self) -> str:
        """Return the figures in one sentence."""
        low, ratio, high = self.ratio
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in self.tokens_per_second.items())
        share = self.accepted / max(1, self.drafted)
        outcome = "the artifact has it" if self.is_faster else "it was left out"
        return (
            f"with the draft model {self.draft}, lone answers came {ratio:.2f} ({low:.2f} to {high:.2f}) times as fast "
            f"as without (tokens per second: {rates}); {share:.2f} of {self.drafted} drafted tokens were right, and "
            f"{self.same} of {self.prompts} texts the same; {outcome}"
        )


class TrialRecord(BaseModel):
    """The record of one trial of a search.

    name: its settings, for people; settings: the same for programs; heal: training steps of its healing. fidelity: mean
    over the validation samples; drop: decrease of the task's metric on them; None if not measured. latency: seconds for
    one sample. size: bytes. speedup: over the original. divergence (nats), first_token (seconds), tokens_per_second: of
    models that write; None for others. measured: whether an artifact was built and measured; else all figures are
    predicted. foretold: the speed-up that was predicted for a trial that was then built. front: whether it is on the
    Pareto front of the trials that were built. reason: why it was chosen, or what it lost by.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    settings: dict[str, float] = {}
    heal: int = 0
    fidelity: float | None
    drop: float | None = None
    latency: float
    size: float
    speedup: float
    divergence: float | None = None
    first_token: float | None = None
    tokens_per_second: float | None = None
    measured: bool = True
    foretold: float | None = None
    front: bool = False
    reason: str


class DynamicBaseline(BaseModel):
    """ONNX Runtime's dynamic quantization of the same ONNX file, beside the artifact.

    size: bytes. samples: how many of the test samples the fidelities were measured on. speed: at batch 1, the median
    over rounds of the artifact's time divided by its own. gave_up: a sentence for each of size, fidelity and
    speed in which the artifact is worse. unavailable: why there are no figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: NonNegativeInt = 0
    samples: NonNegativeInt = 0
    fidelity: float = 0.0
    fidelity_worst: float = 0.0
    artifact_fidelity: float = 0.0
    speed: NonNegativeFloat = 0.0
    gave_up: tuple[str, ...] = ()
    unavailable: str = ""

    def describe(self) -> str:
        """Return the figures in one line, or why there are none."""
        if self.unavailable:
            return f"not available: {self.unavailable}"
        fidelities = f"{format_fidelity(self.fidelity)}, worst {format_fidelity(self.fidelity_worst)}"
        return f"{format_bytes(self.size)}, fidelity {fidelities}, {self.speed:.2f} x the artifact's speed"


class Measurements(BaseModel):
    """Everything about an artifact that differs from run to run; the content of measured.json.

    timings: empty where the engine was not on the machine. writing: of models that write. knee: the smallest batch
    whose throughput is within 5 % of the best, in rows; the server batches up to it. stages: seconds per step of the
    run. seconds: duration of each stage in the history, by the key of its record. peak_memory: bytes. report: SHA-256
    of report.html. original_size: bytes of the source's weights. arithmetic: the share of the weights that each
    arithmetic multiplies with, as the engine reports it. products: the products of the model, each with the kernel that
    runs; empty in artifacts of earlier versions. search: the trials, if a search found the artifact. dynamic: another
    form of an ONNX file; None where it was not compared. draft: the trial of a draft model, whether the artifact has it
    now or not; None without one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: Machine
    timings: tuple[Timing, ...]
    writing: tuple[WritingSpeed, ...] = ()
    knee: PositiveInt
    stages: dict[str, float]
    peak_memory: NonNegativeInt
    original_size: NonNegativeInt
    arithmetic: dict[str, float] = {}
    products: tuple[Product, ...] = ()
    seconds: dict[str, float] = {}
    search: tuple[TrialRecord, ...] = ()
    dynamic: DynamicBaseline | None = None
    draft: DraftTrial | None = None
    report: str | None = None

    @property
    def multiply_adds(self) -> dict[str, float]:
        """The share of the multiply-adds of one sample in each arithmetic, as the engine reports it; empty where it
        does not, or was not on the machine."""
        return share_multiply_adds(self.products)

    @property
    def why_not_audited(self) -> str:
        """Why the share is not known, where it is not. An engine that was on the machine was timed."""
        if not self.products:
            return NOT_COUNTED
        return NOT_REPORTED if self.timings else NOT_AUDITED

    @property
    def lone_latency(self) -> float | None:
        """Latency of the artifact for one sample, in seconds; None if nothing was timed."""
        return next((time.seconds for time in self.timings if time.engine != ORIGINAL and time.batch == 1), None)


def find_pair(speeds: Sequence[WritingSpeed]) -> tuple[WritingSpeed, WritingSpeed] | None:
    """Find the speeds of the original and of the artifact; None where nothing was written."""
    original = next((each for each in speeds if each.engine == ORIGINAL), None)
    artifact = next((each for each in speeds if each.engine != ORIGINAL), None)
    return (original, artifact) if original and artifact else None


def find_knee(seconds: dict[int, float], *, slack: float = 0.05) -> int:
    """Find the smallest batch size whose throughput is within `slack` of the best.

    seconds: per run, by batch size (rows). Returns rows.
    On two cores MiniLM peaks at 8 rows and loses 17 % at 64, so the cap is measured, never guessed.
    """
    best = max(batch / time for batch, time in seconds.items())
    return min(batch for batch, time in seconds.items() if batch / time >= (1 - slack) * best)
