"""The search of a precision ladder for the first plan that meets a goal."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from laconic.arrays import Array
from laconic.quantization.plan import Plan, PrecisionLadder
from laconic.tasks.tolerance import Tolerance


@dataclass(frozen=True)
class PlanTrial:
    """What came of the trial of a plan.

    fidelity: of its outputs to the original's, [samples]. information_loss: the slack that a tolerance must have for
    what the outputs say, 1 at the limit of the default. divergence: from the original's outputs, the mean.
    """

    fidelity: Array
    information_loss: float = 0.0
    divergence: float = 0.0

    def meets(self, goal: Tolerance) -> bool:
        """Return whether fidelity and information are enough, and the divergence is small enough."""
        is_near = goal.max_divergence is None or self.divergence <= goal.max_divergence
        return is_near and goal.met_by(self.fidelity) and (self.information_loss <= goal.slack or not goal.slack)


def find_plan(
    ladder: PrecisionLadder,
    trial: Callable[[Plan], PlanTrial],
    goal: Tolerance,
    is_sound: Callable[[Plan], bool] = lambda plan: True,
) -> tuple[Plan, PlanTrial, bool]:
    """Find the first sound plan that meets the goal, its trial, and whether one does; else the most faithful that was
    tried.

    Searches each rung between its ends: fidelity grows along it, but for small steps down, which may cost a step and
    never the goal. is_sound: whether the engine runs a plan as it is written, asked only of plans that meet the goal.
    """
    tried: list[tuple[Plan, PlanTrial]] = []
    for rung in ladder.rungs:
        trials = RungTrials(rung, trial, goal, ladder.sensitivity)
        if (solution := trials.find(is_sound)) is not None:
            return *solution, True
        tried += trials.tried.values()
    plan, best = max(tried, key=lambda each: float(each[1].fidelity.mean()))
    return plan, best, False


@dataclass
class RungTrials:
    """The trials of one rung's plans, each made once.

    sensitivity: of each layer, as in PrecisionLadder. tried: plan and trial, by the plan's place in the rung.
    """

    rung: Sequence[Plan]
    trial: Callable[[Plan], PlanTrial]
    goal: Tolerance
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    tried: dict[int, tuple[Plan, PlanTrial]] = field(default_factory=dict)

    def find(self, is_sound: Callable[[Plan], bool]) -> tuple[Plan, PlanTrial] | None:
        """Find the first sound plan that meets the goal, and its trial. The first that meets it is nearly always sound,
        so the others are only asked where it is not."""

        def is_met_and_sound(place: int) -> bool:
            return self.is_met(place) and is_sound(self.tried[place][0])

        found = find_first(range(len(self.rung)), self.is_met, self.predict)
        if found is not None and not is_met_and_sound(found):
            found = find_first(range(found + 1, len(self.rung)), is_met_and_sound)
        return None if found is None else self.tried[found]

    def is_met(self, place: int) -> bool:
        """Return whether the plan at a place meets the goal."""
        if place not in self.tried:
            plan = self.rung[place]
            self.tried[place] = plan, self.trial(plan)
        return self.tried[place][1].meets(self.goal)

    def predict(self, low: int, high: int) -> int:
        """Predict the first place that is expected to meet the goal, of those after `low`, which misses it, to `high`.

        Between two plans that were tried, the infidelity is taken to fall as the sum of the sensitivities of the layers
        that are still to be raised, and so are the divergence and the information that is lost. The middle where these
        are not known.
        """
        middle = self.rung[(low + high) // 2]  # which measures the sensitivities where they are not
        waiting = self._list_waiting(middle)
        if not waiting or not self.sensitivity.keys() >= waiting:
            return (low + high) // 2
        sums = [sum(map(self.sensitivity.__getitem__, self._list_waiting(each))) for each in self.rung[low : high + 1]]
        missed, met = (self.tried[place][1].fidelity for place in (low, high))
        crossing = find_crossing(sums, 1 - float(missed.mean()), 1 - float(met.mean()), 1 - self.goal.mean)
        if self.goal.worst is not None:
            worst = find_crossing(sums, 1 - float(missed.min()), 1 - float(met.min()), 1 - self.goal.worst)
            crossing = max(crossing, worst)
        if self.goal.max_divergence is not None:
            missed_mean, met_mean = (self.tried[place][1].divergence for place in (low, high))
            crossing = max(crossing, find_crossing(sums, missed_mean, met_mean, self.goal.max_divergence))
        missed_loss, met_loss = (self.tried[place][1].information_loss for place in (low, high))
        if self.goal.slack and self.goal.slack < missed_loss < math.inf:
            crossing = max(crossing, find_crossing(sums, missed_loss, met_loss, self.goal.slack))
        return low + crossing

    def _list_waiting(self, plan: Plan) -> set[str]:
        """List the layers that the last plan of the rung has in another precision."""
        last = self.rung[-1].precision
        return {node for node, precision in plan.precision.items() if last[node] != precision}


def find_crossing(sums: Sequence[float], first: float, last: float, limit: float) -> int:
    """Find the first place where a quantity is at most `limit` that changes linearly with falling sums, from `first`
    to `last`; the last place where it never is."""
    span = sums[0] - sums[-1]

    def expected(total: float) -> float:
        return last + (first - last) * (total - sums[-1]) / span if span > 0 else last

    return next((place for place, total in enumerate(sums) if expected(total) <= limit), len(sums) - 1)


def find_first(
    places: range, holds: Callable[[int], bool], predict: Callable[[int, int], int] | None = None
) -> int | None:
    """Find the first place where a condition holds: once it holds, it holds for all that follow.

    predict: guesses the place between one where the condition does not hold and one where it does. Each third step, and
    each without a guess, halves what is left, which bounds the number of steps where the guesses are bad.
    """
    if not places or holds(places[0]):
        return places[0] if places else None
    if len(places) == 1 or not holds(places[-1]):
        return None
    low, high = places[0], places[-1]
    steps = 0
    while high - low > 1:
        steps += 1
        guess = predict(low, high) if predict and steps % 3 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
