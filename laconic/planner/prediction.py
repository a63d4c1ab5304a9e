"""What a combination of techniques takes, in memory and in time: predicted by simulating a step."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
from torch import nn

from laconic.memory.gradient_accumulation import Accumulate
from laconic.offload.memory_accounting import CATEGORIES, Category, accounted
from laconic.planner.depth import ENDS, cut, deep, extended, place, shallow
from laconic.planner.memory_timeline import Course
from laconic.planner.meta_model import Subject
from laconic.planner.rates import Rates, per_parameter
from laconic.planner.simulate import imagined, simulate
from laconic.planner.step_cost import STEPPING, Meter, Work
from laconic.training.parallel.ranks import Ranks
from laconic.training.settings import Training, TrainingComponents
from laconic.training.step.objective import Batch
from laconic.training.step.train_state import TrainState
from laconic.training.step_assembly import distribute_step, make_step_parts

MICRO = 2
"""Micro-batches that are simulated: the second meets the gradients of the first, and all others are like it."""


@dataclass(frozen=True)
class Prediction:
    """peak, host: the most bytes on the device and on the host. at_peak: what the device's are for at that moment.
    phases: the same at the peak of each phase. work: of one step, over all micro-batches. course: byte by byte, where
    the whole depth was simulated."""

    peak: int
    host: int
    at_peak: Mapping[Category, int]
    phases: Mapping[str, Mapping[Category, int]]
    work: Work
    course: Course | None = None

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.work.seconds()


def predict(
    subject: Subject, training: Training, length: int, rates: Rates, *, whole: bool = False, ranks: Ranks | None = None
) -> Prediction:
    """Simulate a step of `training.batch_size` rows of `length` tokens on one device, or on the first of several ranks.

    A deep stack of equal layers is simulated twice with few of them, and the line through both is followed, part by
    part; `whole` simulates all of them. Raises RecipeError where the techniques do not fit the model.
    """
    parts = training.components()
    linear = all(technique.is_linear for technique in parts.techniques.values())
    ranks = ranks or Ranks()
    # Weights of shards are gathered a layer ahead.
    ends = ENDS if ranks.axes is None else ENDS + 1
    depth = deep(subject.module, ends) if linear and not whole else None
    if depth is None:
        return measured(*simulated(subject.copy(), subject, training, parts, length, rates, ranks))
    found = []
    for layers in shallow(ends):
        with cut(subject.module, layers):
            module = copy.deepcopy(subject.module)
        found.append(simulated(module, subject, training, parts, length, rates, ranks))
    return lengthened(found, depth, ends)


def simulated(
    module: nn.Module,
    subject: Subject,
    training: Training,
    parts: TrainingComponents,
    length: int,
    rates: Rates,
    ranks: Ranks,
) -> tuple[Course, Work]:
    """The course of memory, and the work of one step."""
    rows, times = ceil(training.batch_size / ranks.world), 1.0
    cuts = [technique.rows for technique in parts.techniques.values() if isinstance(technique, Accumulate)]
    if cuts and rows > MICRO * cuts[0]:
        times = rows / (MICRO * cuts[0])
        rows = MICRO * cuts[0]

    made: list[TrainState] = []

    def prepare() -> tuple[TrainState, Batch]:
        objective = subject.objective()
        places = any(technique.places for technique in parts.techniques.values())
        with accounted("host" if places else "device"):
            imagined(module)
        step = make_step_parts(module, objective, parts, torch.device("cpu"))
        # No more micro-batches than are simulated.
        distribute_step(step, training.model_copy(update={"batch_size": rows * ranks.world}), ranks)
        state = step.assemble()
        made.append(state)
        return state, objective.make_example(rows, length)

    meter = Meter(rates)
    course = simulate(prepare, meter=meter, clip=training.max_grad_norm)
    work = stepping(made[0], parts, meter.phases.pop(STEPPING, Work()), rates)
    for phase, each in meter.phases.items():
        work = work.plus(each, times if phase in ("forward", "backward") else 1.0)
    return course, work


def stepping(state: TrainState, parts: TrainingComponents, work: Work, rates: Rates) -> Work:
    """The optimizer's own work, from what it was measured to take for a parameter on the side where it is done."""
    count = sum(parameter.numel() for group in state.optimizer.param_groups for parameter in group["params"])
    if work.host > work.device:
        return Work(host=count * per_parameter(parts.optimizer, rates.host or rates))
    return Work(device=count * per_parameter(parts.optimizer, rates))


def measured(course: Course, work: Work) -> Prediction:
    """What a course over the whole depth says."""
    host = int(course.host.max(initial=0))
    return Prediction(course.peak(), host, course.at_peak(), course.phases(), work, course)


def lengthened(found: list[tuple[Course, Work]], depth: int, ends: int) -> Prediction:
    """What the courses of two shallow models say of a deep one."""
    (low, less), (high, more) = found
    moments = [course.moments(partial(place, ends=ends)) for course in (low, high)]
    parts: dict[str, dict[Category, int]] = {}
    for name in sorted(moments[0].keys() & moments[1].keys()):
        before, after = low.at(moments[0][name]), high.at(moments[1][name])
        parts[name] = {kind: round(extended((before[kind], after[kind]), depth, ends)) for kind in CATEGORIES}
    phases: dict[str, dict[Category, int]] = {}
    for name, part in parts.items():
        phase = name.partition(" ")[0]
        phases[phase] = max(phases.get(phase, part), part, key=total)
    at_peak = max(phases.values(), key=total)
    host = extended((float(low.host.max(initial=0)), float(high.host.max(initial=0))), depth, ends)
    (a, b) = shallow(ends)
    work = replace(less).plus(more.plus(less, -1.0), (depth - a) / (b - a))
    return Prediction(total(at_peak), round(host), at_peak, phases, work)


def total(part: Mapping[Category, int]) -> int:
    """Bytes of all categories."""
    return sum(part.values())
