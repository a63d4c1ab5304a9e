"""The memory of a rank of a pipeline over a step, from what its stages take and the order of its schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.pipelining import PipelineStage

from train.offload.memory_accounting import CATEGORIES
from train.parallel.mesh import ScheduleName
from train.parallel.pipeline_schedules import SCHEDULES, Action, list_actions
from train.planner.simulate import open_fake_process_group
from train.planner.stage_footprint import Bytes, StageFootprint

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES = range(len(CATEGORIES))


@lru_cache(maxsize=128)
def order_actions(schedule: ScheduleName, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Order what each rank of a pipeline does in a step, as torch's schedule does."""
    kind = SCHEDULES[schedule]
    places = kind.place_stages(ranks)
    like = torch.empty(1, device="meta", requires_grad=True)
    with open_fake_process_group(ranks):
        stages = [
            PipelineStage(
                nn.Identity(),
                stage,
                len(places),
                torch.device("cpu"),
                input_args=(like,) if stage else (),
                output_args=(like,),
                group=dist.group.WORLD,
            )
            for stage, rank in enumerate(places)
            if rank == 0
        ]
        return list_actions(kind.make_schedule(stages, micro_batches), ranks, micro_batches)


class StageEvent(NamedTuple):
    """What changes the memory of a rank: an action of its schedule (F, B, I or W), R where the gradients of a stage are
    reduced to shards, and T where those of tied weights are one. is_first: whether the stage has no gradients yet."""

    kind: str
    stage: int
    is_first: bool


@dataclass(frozen=True)
class RankEvents:
    """The events of a rank in a step. kinds: those that differ. order: [events] int64, the index of each in `kinds`."""

    kinds: tuple[StageEvent, ...]
    order: NDArray[np.int64]


@lru_cache(maxsize=128)
def order_events(schedule: ScheduleName, ranks: int, micro_batches: int) -> list[RankEvents]:
    """Order the events of each rank of a pipeline in a step."""
    return [list_events(order, micro_batches) for order in order_actions(schedule, ranks, micro_batches)]


def list_events(order: Sequence[Action], micro_batches: int) -> RankEvents:
    """List the events of a rank whose actions are these."""
    passed = dict.fromkeys((stage for _, stage, _ in order), 0)
    numbers: dict[StageEvent, int] = {}
    events: list[int] = []

    def add(kind: str, stage: int, *, is_first: bool = False) -> None:
        events.append(numbers.setdefault(StageEvent(kind, stage, is_first), len(numbers)))

    for kind, stage, _ in order:
        is_first = kind in ("B", "W") and not passed[stage]
        add(kind, stage, is_first=is_first)
        if kind in ("B", "W"):
            passed[stage] += 1
            if is_first and all(passed.values()):
                add("T", stage)
            if passed[stage] == micro_batches:
                add("R", stage)
    return RankEvents(tuple(numbers), np.array(events, np.int64))


def sends_on(places: Sequence[int], stage: int) -> bool:
    """Return whether the hidden states of a stage go to another rank. places: the ranks of all stages."""
    return stage + 1 < len(places) and places[stage + 1] != places[stage]


def sends_back(places: Sequence[int], stage: int) -> bool:
    """Return whether the gradient of what a stage receives goes to another rank. places: as of `sends_on`."""
    return stage > 0 and places[stage - 1] != places[stage]


@dataclass(frozen=True, eq=False)
class StageWalk:
    """The memory of one rank of a pipeline on its way through a schedule. footprints: of its stages. places: the ranks
    of all stages. keeps_sent: whether what is sent is held to the end of the step. shards: ranks that share the
    weights; None without any. tied: bytes of the weights that two of the stages have in common.

    Between two stages of the rank hidden states take the place of the buffer that they would be received in.
    """

    footprints: Mapping[int, StageFootprint]
    places: Sequence[int]
    micro_batches: int
    keeps_sent: bool
    shards: int | None = None
    tied: float = 0.0

    def run(self, events: RankEvents) -> Bytes:
        """Return the bytes by category at the peak of a step."""
        begin = self._count_start()
        more, change = (np.stack(list(map(of, events.kinds))) for of in (self._count_more, self._count_change))
        live = np.cumsum([begin, *change[events.order]], axis=0)
        highest = int((live[:-1].sum(1) + more.sum(1)[events.order]).argmax())
        end = live[-1]
        end[TEMPORARIES] = 0
        steps = [end + footprint.optimizer / (self.shards or 1) for footprint in self.footprints.values()]
        peak: Bytes = max([begin, live[highest] + more[events.order[highest]], *steps], key=np.sum)
        return peak

    def _count_start(self) -> Bytes:
        """Count what there is before the first pass: weights are gathered beside their shards."""
        live = np.zeros(len(CATEGORIES))
        for stage, footprint in self.footprints.items():
            live = live + footprint.held / (self.shards or 1)
            if self.shards is not None:
                live[PARAMETERS] += footprint.held[PARAMETERS]
            ends = (stage > 0) + (stage < len(self.places) - 1)
            live[ACTIVATIONS] += ends * self.micro_batches * footprint.hidden
        for category in (PARAMETERS, OPTIMIZER):
            live[category] *= 1 - self._share_tied()
        return live

    def _count_more(self, event: StageEvent) -> Bytes:
        """Count what there is at the peak of an event beside what there was before it."""
        footprint = self.footprints[event.stage]
        if event.kind in ("T", "R"):
            return self._count_reduced(footprint) if event.kind == "R" else np.zeros(len(CATEGORIES))
        if event.kind == "W" and event.is_first:
            return max(footprint.first_backward, footprint.weights, key=np.sum)
        backward = footprint.first_backward if event.is_first else footprint.backward
        return {"F": footprint.forward, "B": backward, "I": footprint.inputs, "W": footprint.weights}[event.kind]

    def _count_change(self, event: StageEvent) -> Bytes:
        """Count by how much an event changes what there is."""
        kind, stage, is_first = event
        footprint = self.footprints[stage]
        if kind == "T":
            return self._at(GRADIENTS, -self._share_tied() * sum(map(count_gradients, self.footprints.values())))
        if kind == "R":
            freed = self._at(GRADIENTS, count_gradients(footprint)) + self._at(PARAMETERS, footprint.held[PARAMETERS])
            return self._count_reduced(footprint) - freed if self.shards is not None else 0 * freed
        is_handed_on = stage + 1 < len(self.places) and not sends_on(self.places, stage)
        saved = footprint.saved - self._at(ACTIVATIONS, is_handed_on * footprint.hidden)
        if kind == "F":
            return saved
        sent = self._at(TEMPORARIES, self._count_sent(event))
        if kind == "I":
            return footprint.between + sent
        change = sent - saved - (footprint.between if kind == "W" else 0)
        return change + footprint.gradients if is_first else change

    def _count_sent(self, event: StageEvent) -> float:
        """Count what is kept of what a pass has made for other ranks, in bytes."""
        kind, stage, is_first = event
        if not self.keeps_sent:
            return (stage > 0) * is_first * self.footprints[stage].hidden
        on, back = sends_on(self.places, stage), sends_back(self.places, stage)
        return ((kind != "I") * on + (kind != "W") * back) * self.footprints[stage].hidden

    def _count_reduced(self, footprint: StageFootprint) -> Bytes:
        """Count the gradients of a stage in shards, which are reduced after its last backward pass."""
        return self._at(GRADIENTS, 0.0 if self.shards is None else count_gradients(footprint) / self.shards)

    def _share_tied(self) -> float:
        """Return the share of tied weights, which are counted once, in the weights of the stages."""
        return self.tied / sum(float(footprint.held[PARAMETERS]) for footprint in self.footprints.values())

    def _at(self, category: int, amount: float) -> Bytes:
        """Return bytes of one category."""
        result = np.zeros(len(CATEGORIES))
        result[category] = amount
        return result


def count_gradients(footprint: StageFootprint) -> float:
    """Count the bytes of a stage's gradients."""
    return float(footprint.gradients[GRADIENTS])


@lru_cache(maxsize=128)
def compute_bubble(schedule: ScheduleName, ranks: int, micro_batches: int) -> float:
    """Return the share of the time of equal stages in which they wait for others, 0 to 1; not that of `zbv`, which
    depends on how long the parts of a backward pass take."""
    stages = SCHEDULES[schedule].stages
    return (ranks - 1) / (stages * micro_batches + ranks - 1)
