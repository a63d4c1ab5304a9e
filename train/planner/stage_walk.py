"""The memory of a rank of a pipeline over a step, from what its stages take and the order of its schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from train.offload.memory_accounting import CATEGORIES
from train.parallel.mesh import ScheduleName
from train.parallel.pipeline_schedules import SCHEDULES, Action, list_actions, measure_bubble
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


@dataclass(eq=False)
class StageWalk:
    """The memory of one rank of a pipeline on its way through a schedule. footprints: of its stages. last: the number
    of the last stage of all. keeps_sent: whether what is sent is held to the end of the step. shards: ranks that share
    the weights; None without any. tied: bytes of the weights that two of the stages have in common."""

    footprints: Mapping[int, StageFootprint]
    last: int
    micro_batches: int
    keeps_sent: bool
    shards: int | None = None
    tied: float = 0.0
    live: Bytes = field(init=False)
    peak: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.live = np.zeros(len(CATEGORIES))
        for stage, footprint in self.footprints.items():
            self.live = self.live + self._shard_held(footprint.held)
            ends = (stage > 0) + (stage < self.last)
            self.live[ACTIVATIONS] += ends * self.micro_batches * footprint.hidden
        self._remove_tied(PARAMETERS, OPTIMIZER)
        self.peak = self.live
        self._passed = dict.fromkeys(self.footprints, 0)

    def run(self, order: Sequence[Action]) -> Bytes:
        """Return the bytes by category at the peak of a step."""
        for kind, stage, _ in order:
            self._act(kind, stage, self.footprints[stage])
        self._finish()
        return self.peak

    def _act(self, kind: str, stage: int, footprint: StageFootprint) -> None:
        if kind == "F":
            self._reach(footprint.forward)
            self.live = self.live + footprint.saved
            return
        is_new = not self._passed[stage]
        self._reach(footprint.first_backward if is_new else footprint.backward)
        if kind == "I":  # the weights' gradients come later, and so does the end of what they need
            return
        self.live = self.live - footprint.saved
        self._passed[stage] += 1
        if is_new:
            self.live = self.live + footprint.gradients
            if all(self._passed.values()):
                self._remove_tied(GRADIENTS)
        if self.keeps_sent:
            self.live[TEMPORARIES] += ((stage > 0) + (stage < self.last)) * footprint.hidden
        elif is_new:
            self.live[TEMPORARIES] += (stage > 0) * footprint.hidden
        if self.shards is not None and self._passed[stage] == self.micro_batches:
            self._reduce(footprint, self.shards)

    def _reduce(self, footprint: StageFootprint, shards: int) -> None:
        """Reduce the gradients of a stage to shards after its last backward pass, and free its gathered weights."""
        gradients = float(footprint.gradients[GRADIENTS])
        self.live[GRADIENTS] += gradients / shards
        self._reach(np.zeros(len(CATEGORIES)))
        self.live[GRADIENTS] -= gradients
        self.live[PARAMETERS] -= float(footprint.held[PARAMETERS])

    def _finish(self) -> None:
        """Step the optimizer."""
        self.live[TEMPORARIES] = 0
        for footprint in self.footprints.values():
            self._reach(footprint.optimizer / (self.shards or 1))

    def _remove_tied(self, *categories: int) -> None:
        """Count tied weights once: their share of what the stages have in these categories."""
        weights = sum(float(footprint.held[PARAMETERS]) for footprint in self.footprints.values())
        for category in categories:
            self.live[category] *= 1 - self.tied / weights

    def _shard_held(self, held: Bytes) -> Bytes:
        """Return what is held in shards, with the weights gathered beside their shards."""
        if self.shards is None:
            return held
        result: Bytes = held / self.shards
        result[PARAMETERS] += held[PARAMETERS]
        return result

    def _reach(self, more: Bytes) -> None:
        if (self.live + more).sum() > self.peak.sum():
            self.peak = self.live + more


@lru_cache(maxsize=128)
def compute_bubble(schedule: ScheduleName, ranks: int, micro_batches: int) -> float:
    """Return the share of the time of equal stages in which they wait for others, 0 to 1."""
    stages = SCHEDULES[schedule].stages
    if schedule == "zbv":
        return measure_bubble(order_actions(schedule, ranks, micro_batches), [1.0] * (stages * ranks))
    return (ranks - 1) / (stages * micro_batches + ranks - 1)
