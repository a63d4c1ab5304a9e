"""What a combination of techniques takes, in memory and in time: predicted by simulating a step."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
from torch import nn

from laconic.memory.account import CATEGORIES, Category, accounted
from laconic.memory.accumulate import Accumulate
from laconic.parallel.ranks import Ranks
from laconic.parallel.spread import spread
from laconic.planner.depth import ENDS, cut, deep, extended, place, shallow
from laconic.planner.ledger import Course
from laconic.planner.rates import Rates
from laconic.planner.simulate import imagined, simulate
from laconic.planner.subject import Subject
from laconic.planner.work import Meter, Work
from laconic.training.assembly import make_kit
from laconic.training.kit import Kit
from laconic.training.objective import Batch
from laconic.training.settings import Parts, Training

MICRO = 2
"""Micro-batches that are simulated: the second meets the gradients of the first, and all others are like it."""


@dataclass(frozen=True)
class Prediction:
    """peak, host: the most bytes on the device and on the host. at_peak: what the device's are for at that moment.
    phases: the most in each phase. work: of one step, over all micro-batches. course: byte by byte, where the whole
    depth was simulated."""

    peak: int
    host: int
    at_peak: Mapping[Category, int]
    phases: Mapping[str, int]
    work: Work
    course: Course | None = None

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.work.seconds()


def predict(
    subject: Subject, training: Training, length: int, rates: Rates, *, whole: bool = False, ranks: Ranks | None = None
) -> Prediction:
    """Simulate a step of `training.batch` rows of `length` tokens, on one device, or on the first of several ranks.

    A deep stack of equal layers is simulated twice with few of them, and the line through both is followed, part by
    part; `whole` simulates all of them. Raises RecipeError where the techniques do not fit the model.
    """
    parts = training.parts()
    linear = all(technique.linear for technique in parts.techniques.values())
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
    module: nn.Module, subject: Subject, training: Training, parts: Parts, length: int, rates: Rates, ranks: Ranks
) -> tuple[Course, Work]:
    """The course of memory, and the work of one step."""
    rows, times = ceil(training.batch / ranks.world), 1.0
    cuts = [technique.rows for technique in parts.techniques.values() if isinstance(technique, Accumulate)]
    if cuts and rows > MICRO * cuts[0]:
        times = rows / (MICRO * cuts[0])
        rows = MICRO * cuts[0]

    def prepare() -> tuple[Kit, Batch]:
        objective = subject.objective()
        places = any(technique.places for technique in parts.techniques.values())
        with accounted("host" if places else "device"):
            imagined(module)
        kit = make_kit(module, objective, parts, torch.device("cpu"))
        spread(kit, training, ranks)
        kit.parts = 1  # no more of them than are simulated
        kit.assemble()
        return kit, objective.example(rows, length)

    meter = Meter(rates)
    course = simulate(prepare, meter=meter, clip=training.clip)
    work = Work()
    for phase, each in meter.phases.items():
        work = work.plus(each, times if phase in ("forward", "backward") else 1.0)
    return course, work


def measured(course: Course, work: Work) -> Prediction:
    """What a course over the whole depth says."""
    return Prediction(course.peak(), int(course.host.max(initial=0)), course.at_peak(), course.peaks(), work, course)


def lengthened(found: list[tuple[Course, Work]], depth: int, ends: int) -> Prediction:
    """What the courses of two shallow models say of a deep one."""
    (low, less), (high, more) = found
    moments = [course.moments(partial(place, ends=ends)) for course in (low, high)]
    peaks: dict[str, int] = {}
    phases: dict[str, int] = {}
    for name in moments[0].keys() & moments[1].keys():
        pair = low.device[moments[0][name]], high.device[moments[1][name]]
        peaks[name] = round(extended((float(pair[0]), float(pair[1])), depth, ends))
        phase = name.partition(" ")[0]
        phases[phase] = max(phases.get(phase, 0), peaks[name])
    top = max(sorted(peaks), key=lambda name: peaks[name])
    before, after = low.at(moments[0][top]), high.at(moments[1][top])
    at_peak = {kind: round(extended((before[kind], after[kind]), depth, ends)) for kind in CATEGORIES}
    host = extended((float(low.host.max(initial=0)), float(high.host.max(initial=0))), depth, ends)
    (a, b) = shallow(ends)
    work = replace(less).plus(more.plus(less, -1.0), (depth - a) / (b - a))
    return Prediction(peaks[top], round(host), at_peak, phases, work)
