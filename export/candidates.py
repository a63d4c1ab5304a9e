"""Choose a plan and an engine: per engine the smallest plan that meets the goal, then the fastest of these."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from export.build import EngineOption
from laconic.quantization.plan import INTEGER, Plan, PrecisionLadder
from laconic.tasks.task import Tolerance
from laconic.tensor import Array
from laconic.timing.measurements import Timing

ADVANTAGE = 1.05
"""How much faster a less preferred engine must be to be taken: smaller differences change from run to run, and the
artifact should not. At 1.1 MiniLM with a third of its feed-forward units was left at 5.94 x, where 6.33 x was to be had
at the same fidelity."""


@dataclass(frozen=True)
class EngineCandidate:
    """A plan, built for an engine.

    fidelity: [samples], on the samples that choices are made with. met: whether it meets the goal. arithmetic: the
    share of the weights that each arithmetic multiplies with, as the engine reports it. speedup: over the original, 1
    until it is timed.
    """

    option: EngineOption
    plan: Plan
    model: Path
    fidelity: Array
    met: bool
    arithmetic: dict[str, float]
    speedup: float = 1.0

    @property
    def name(self) -> str:
        """As shown to users: the engine, its arithmetic, and whether only the weights, or nothing, is quantized. Unique
        within a run."""
        if self.is_plain:
            return f"{self.option.name}, as it was"
        return self.option.name if self.is_integer else f"{self.option.name}, weights alone"

    @property
    def is_integer(self) -> bool:
        """Whether some layer computes in INT8."""
        return bool(INTEGER & set(self.plan.precision.values()))

    @property
    def is_plain(self) -> bool:
        """Whether nothing was quantized."""
        return set(self.plan.precision.values()) <= {"float32"}


def pair_ladders(
    ladder: PrecisionLadder, options: Sequence[EngineOption]
) -> Iterator[tuple[PrecisionLadder, EngineOption]]:
    """Yield each engine option with the part of the ladder to try on it, the preferred first.

    BF16 goes from the top of one rung to the top of the next as well: weights in fewer bits and no arithmetic in
    INT8 is more faithful, and where the processor multiplies matrices of BF16 no slower (MiniLM with half of its heads
    and feed-forward units, batch 8, Xeon with AMX: 38 ms, and 53 ms in INT8). Last comes the graph as it was, the way
    back where a model is so small that INT8 costs more than it saves.
    """
    choice = len(ladder.rungs) > 1
    tops = PrecisionLadder(tuple((rung[-1],) for rung in ladder.rungs))
    yield from ((tops, option) for option in options if choice and option.compute == "bfloat16")
    yield from ((ladder, option) for option in options)
    last = PrecisionLadder.of(ladder.rungs[-1][-1])
    yield from ((last, option) for option in options if choice and option.compute == "float32")


def find_plan(ladder: PrecisionLadder, trial: Callable[[Plan], Array], goal: Tolerance) -> tuple[Plan, Array, bool]:
    """The first plan that meets the goal, its fidelity, and whether one does; else the most faithful that was tried.

    Bisects each rung: fidelity grows along it, but for small steps down, which may cost a step and never the goal.
    """
    tried: list[tuple[Plan, Array]] = []

    def met(plan: Plan) -> bool:
        tried.append((plan, trial(plan)))
        return goal.met_by(tried[-1][1])

    for rung in ladder.rungs:
        if met(rung[0]):
            return *tried[-1], True
        if len(rung) == 1 or not met(rung[-1]):
            continue
        found = tried[-1]
        low, high = 0, len(rung) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if met(rung[middle]):
                found, high = tried[-1], middle
            else:
                low = middle
        return *found, True
    plan, fidelity = max(tried, key=lambda each: float(each[1].mean()))
    return plan, fidelity, False


def choose_fastest(candidates: Sequence[EngineCandidate]) -> EngineCandidate:
    """Of those that meet the goal the fastest; an engine that comes later in the order of preference must be faster by
    ADVANTAGE. The graph as it was is taken only where everything smaller is slower than the original. Where none meets
    the goal, the most faithful."""
    meeting = [candidate for candidate in candidates if candidate.met]
    if not meeting:
        return max(candidates, key=lambda candidate: float(candidate.fidelity.mean()))
    quick = [candidate for candidate in meeting if not candidate.is_plain and candidate.speedup >= 1]
    best, *others = quick or meeting
    for candidate in others:
        if candidate.speedup > best.speedup * ADVANTAGE:
            best = candidate
    return best


def mean_speedup(timings: Sequence[Timing]) -> float:
    """The geometric mean of the speed-ups at several batch sizes."""
    return geometric_mean(timing.speedup for timing in timings)
