"""Find, for each engine, the first plan of the ladder that meets the goal; then the fastest of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laconic.measured import Timing
from laconic.plan import Ladder, Plan
from laconic.tasks.task import Tolerance
from laconic.tensor import Array
from laconic.trial import Option

MARGIN = 0.85
"""The share of the allowed infidelity that may be used up on the samples by which is chosen: its mean over MiniLM's
texts moved by up to 6 % between two sets of 250, the worst text by more."""

ADVANTAGE = 1.1
"""How much faster a less preferred engine must be to be taken: smaller differences change from run to run, and the
artifact should not."""


@dataclass(frozen=True)
class Candidate:
    """A plan, built for an engine. fidelity: per sample of those that it is chosen by. met: whether it meets the goal."""

    option: Option
    plan: Plan
    model: Path
    fidelity: Array
    met: bool


def climb(ladder: Ladder, trial: Callable[[Plan], Array], goal: Tolerance) -> tuple[Plan, Array, bool]:
    """The lowest rung that meets the goal, its fidelity, and whether one does; else the most faithful rung.

    Bisects: fidelity grows with the rungs, but for small steps down, which may cost a rung and never the goal.
    """
    low, high = 0, len(ladder.plans) - 1
    seen: dict[int, Array] = {}

    def met(rung: int) -> bool:
        if rung not in seen:
            seen[rung] = trial(ladder.plans[rung])
        return goal.met_by(seen[rung])

    if not met(low):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if met(middle) else (middle, high)
        low = high
    ok = met(low)
    best = low if ok else max(seen, key=lambda rung: float(seen[rung].mean()))
    return ladder.plans[best], seen[best], ok


def tightened(goal: Tolerance, margin: float = MARGIN) -> Tolerance:
    """The goal to choose by, so that samples which no choice has seen meet the real one."""
    worst = None if goal.worst is None else 1 - margin * (1 - goal.worst)
    return Tolerance(mean=1 - margin * (1 - goal.mean), worst=worst)


def fastest(candidates: Sequence[Candidate], timings: dict[str, list[Timing]]) -> Candidate:
    """Of those that meet the goal the one with the best speed-up, geometric mean over batch sizes; an engine that
    comes later in the order of preference must be faster by ADVANTAGE. Where none meets it, the most faithful."""
    meeting = [candidate for candidate in candidates if candidate.met]
    if not meeting:
        return max(candidates, key=lambda candidate: float(candidate.fidelity.mean()))
    best, best_speed = meeting[0], 0.0
    for candidate in meeting:
        speed = float(np.exp(np.mean([np.log(timing.speedup) for timing in timings[candidate.option.name]])))
        if speed > best_speed * (ADVANTAGE if best_speed else 1.0):
            best, best_speed = candidate, speed
    return best
