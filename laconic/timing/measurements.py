"""What was timed, and on which machine."""

from pydantic import BaseModel, ConfigDict

from laconic.hardware import Machine

ORIGINAL = "original"
"""What the source is called among the timings."""


class Timing(BaseModel):
    """One model at one batch size, in one interleaved run with the others.

    engine: the engine and its arithmetic, or "original". batch in rows, length of the longest free axis in its own unit
    (tokens, pixels; 0 where there is none), seconds per run: median, and the quartiles. speedup: the median over rounds
    of the original's time divided by this one's, with the quartiles of that ratio.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    batch: int
    length: int
    threads: int
    seconds: float
    quartiles: tuple[float, float]
    speedup: float
    speedup_quartiles: tuple[float, float]

    @property
    def rows_per_second(self) -> float:
        """Throughput."""
        return self.batch / self.seconds


class TrialRecord(BaseModel):
    """What a search has tried.

    name: what was cut, for people; settings: the same for programs; heal: steps of training after it. fidelity: the
    mean over the samples that are chosen by; drop: of the task's metric on them; None where it was not found. latency:
    seconds for one sample. size: bytes. speedup: over the original. measured: of an artifact that was built; else all
    that is foretold. foretold: the speedup that was expected of what was built then. front: whether nothing that was
    built is as good in every respect and better in one. reason: why it was taken, or what it lost by.
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
    measured: bool = True
    foretold: float | None = None
    front: bool = False
    reason: str


class Measurements(BaseModel):
    """Everything about an artifact that differs from run to run.

    knee: the smallest batch whose throughput is within 5 % of the best, in rows; the server batches up to it. stages:
    seconds per step of the run. seconds: of each stage of the history when it was done, by the key of its record.
    report: SHA-256 of report.html. original_size: bytes of the source's weights. arithmetic: the share of the weights
    that each arithmetic works on, as the engine told. search: what was tried, where a search has led to the artifact.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: Machine
    timings: tuple[Timing, ...]
    knee: int
    stages: dict[str, float]
    peak_memory: int
    original_size: int
    arithmetic: dict[str, float] = {}
    seconds: dict[str, float] = {}
    search: tuple[TrialRecord, ...] = ()
    report: str | None = None

    @property
    def lone_latency(self) -> float:
        """Seconds for one sample."""
        return next(time.seconds for time in self.timings if time.engine != ORIGINAL and time.batch == 1)


def find_knee(seconds: dict[int, float], *, slack: float = 0.05) -> int:
    """Smallest batch size whose throughput is within `slack` of the best.

    seconds: per run, by batch size (rows). Returns rows.
    On two cores MiniLM peaks at 8 rows and loses 17 % at 64, so the cap is measured, never guessed.
    """
    best = max(batch / time for batch, time in seconds.items())
    return min(batch for batch, time in seconds.items() if batch / time >= (1 - slack) * best)
