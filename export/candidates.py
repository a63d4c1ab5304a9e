"""Find, for each engine, the first plan of the ladder that meets the goal; then the fastest of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export.build import Option
from laconic.quantization.plan import INTEGER, Plan, PrecisionLadder
from laconic.tasks.task import Tolerance
from laconic.tensor import Array
from laconic.timing.measurements import Timing

ADVANTAGE = 1.05
"""How much faster a less preferred engine must be to be taken: smaller differences change from run to run, and the
artifact should not. At 1.1 MiniLM with a third of its feed-forward units was left at 5.94 x, where 6.33 x was to be had
at the same fidelity."""


@dataclass(frozen=True)
class Candidate:
    """A plan, built for an engine. fidelity: per sample of those it is chosen by. met: whether it meets the goal.
    arithmetic: the share of the weights that each arithmetic works on, as the engine tells. speedup: over the original,
    1 until it was timed."""

    option: Option
    plan: Plan
    model: Path
    fidelity: Array
    met: bool
    arithmetic: dict[str, float]
    speedup: float = 1.0

    @property
    def name(self) -> str:
        """As shown to people: the engine, its arithmetic, and whether the weights alone are in fewer bits, or nothing
        is. No two of a run have the same."""
        if self.plain:
            return f"{self.option.name}, as it was"
        return self.option.name if self.integer else f"{self.option.name}, weights alone"

    @property
    def integer(self) -> bool:
        """Whether some layer computes in INT8."""
        return bool(INTEGER & set(self.plan.precision.values()))

    @property
    def plain(self) -> bool:
        """Whether nothing was quantized."""
        return set(self.plan.precision.values()) <= {"float32"}


def ways(ladder: PrecisionLadder, options: Sequence[Option]) -> Iterator[tuple[PrecisionLadder, Option]]:
    """What is tried of a ladder with each engine, the preferred first.

    BF16 goes from the top of one flight to the top of the next as well: weights in fewer bits and no arithmetic in
    INT8 is more faithful, and where the processor multiplies matrices of BF16 no slower (MiniLM with half of its heads
    and feed-forward units, batch 8, Xeon with AMX: 38 ms, and 53 ms in INT8). Last comes the graph as it was, the way
    back where a model is so small that INT8 costs more than it saves.
    """
    choice = len(ladder.rungs) > 1
    tops = PrecisionLadder(tuple((flight[-1],) for flight in ladder.rungs))
    yield from ((tops, option) for option in options if choice and option.compute == "bfloat16")
    yield from ((ladder, option) for option in options)
    last = PrecisionLadder.of(ladder.rungs[-1][-1])
    yield from ((last, option) for option in options if choice and option.compute == "float32")


def climb(ladder: PrecisionLadder, trial: Callable[[Plan], Array], goal: Tolerance) -> tuple[Plan, Array, bool]:
    """The first plan that meets the goal, its fidelity, and whether one does; else the most faithful that was tried.

    Bisects each flight: fidelity grows along it, but for small steps down, which may cost a step and never the goal.
    """
    tried: list[tuple[Plan, Array]] = []

    def met(plan: Plan) -> bool:
        tried.append((plan, trial(plan)))
        return goal.met_by(tried[-1][1])

    for flight in ladder.rungs:
        if met(flight[0]):
            return *tried[-1], True
        if len(flight) == 1 or not met(flight[-1]):
            continue
        found = tried[-1]
        low, high = 0, len(flight) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if met(flight[middle]):
                found, high = tried[-1], middle
            else:
                low = middle
        return *found, True
    plan, fidelity = max(tried, key=lambda each: float(each[1].mean()))
    return plan, fidelity, False


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """Of those that meet the goal the fastest; an engine that comes later in the order of preference must be faster by
    ADVANTAGE. The graph as it was is taken only where everything smaller is slower than the original. Where none meets
    the goal, the most faithful."""
    meeting = [candidate for candidate in candidates if candidate.met]
    if not meeting:
        return max(candidates, key=lambda candidate: float(candidate.fidelity.mean()))
    quick = [candidate for candidate in meeting if not candidate.plain and candidate.speedup >= 1]
    best, *others = quick or meeting
    for candidate in others:
        if candidate.speedup > best.speedup * ADVANTAGE:
            best = candidate
    return best


def overall(timings: Sequence[Timing]) -> float:
    """One figure for the speed-ups at several batch sizes: their geometric mean."""
    return float(np.exp(np.mean([np.log(timing.speedup) for timing in timings])))
