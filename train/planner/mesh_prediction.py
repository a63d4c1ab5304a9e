"""The memory, the bubble and the traffic of a mesh, put together from a few ranks that are simulated."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.offload.memory_accounting import CATEGORIES, Category
from train.parallel.mesh import Axis, AxisSizes, ScheduleName
from train.parallel.pipeline_schedules import time_actions
from train.planner.memory_prediction import MemoryPrediction, count_rows, sum_categories
from train.planner.mesh_cases import (
    Case,
    MeshJob,
    StageLayout,
    arrange_stages,
    combine_predictions,
    list_rank_cases,
    list_stage_cases,
)
from train.planner.stage_footprint import StageFootprint, combine_footprints, sum_costs
from train.planner.stage_walk import (
    GRADIENTS,
    PARAMETERS,
    RankEvents,
    StageWalk,
    compute_bubble,
    order_actions,
    order_events,
    sends_back,
    sends_on,
)
from train.planner.step_cost import StepCost
from train.settings import Training

Simulated = Mapping[Case, StageFootprint | MemoryPrediction]


@dataclass(frozen=True)
class MeshPrediction:
    """What a mesh takes. schedule: None without a pipeline. layers: of each rank of the pipeline. ranks: the bytes of
    each at its peak, by category. host: bytes of the host that a rank takes. bubble: as of `find_bubble`. compute:
    seconds of a step, without communication. traffic: bytes that the busiest rank sends in a step, by axis. cost:
    of the slowest rank."""

    sizes: AxisSizes
    schedule: ScheduleName | None
    rows: int
    micro_batches: int
    layers: tuple[int, ...]
    ranks: tuple[Mapping[Category, int], ...]
    host: int
    bubble: float
    compute: float
    traffic: Mapping[Axis, float]
    cost: StepCost

    @property
    def need(self) -> int:
        """Bytes of the rank that needs the most."""
        return max(map(sum_categories, self.ranks))

    def count_seconds(self, link: float) -> float:
        """Return the seconds of a step, where each rank sends `link` bytes a second, and computes nothing meanwhile."""
        return self.compute + sum(self.traffic.values()) / link


def list_cases(job: MeshJob, sizes: AxisSizes, schedule: ScheduleName) -> Iterator[Case]:
    """Yield what is simulated for a mesh. Raises RecipeError for one that is not possible."""
    if sizes.pipeline == 1:
        yield from (case for _, case in list_rank_cases(job.training, sizes))
        return
    layout = arrange_stages(job, sizes, schedule)
    for stage in range(len(layout.layers)):
        yield from (case for _, case in list_stage_cases(layout, stage, sizes.tensor))


def predict_mesh(job: MeshJob, sizes: AxisSizes, schedule: ScheduleName, simulated: Simulated) -> MeshPrediction:
    """Predict a mesh from the cases that `list_cases` names. Raises RecipeError."""
    if sizes.pipeline == 1:
        return predict_whole_ranks(job, sizes, simulated)
    return predict_stages(job, sizes, schedule, simulated)


def predict_whole_ranks(job: MeshJob, sizes: AxisSizes, simulated: Simulated) -> MeshPrediction:
    """Predict a mesh without a pipeline: all its ranks are alike."""
    terms: list[tuple[float, Any]] = [
        (weight, simulated[case]) for weight, case in list_rank_cases(job.training, sizes)
    ]
    prediction, rows = combine_predictions(terms), count_rows(job.training, sizes)
    micro = job.training.components().micro_batch or rows
    gradients = prediction.phases["optimizer"]["gradients"]
    # Along `context`, whole weights have copies, and shards are spread.
    copies, shards = (1, sizes.context) if sizes.shard > 1 else (sizes.context, 1)
    traffic: dict[Axis, float] = {
        "replicate": 2 * share_sent(sizes.replicate * copies) * count_averaged(job.training, sizes, gradients),
        "shard": share_sent(sizes.shard * shards) * prediction.cost.shard,
        "context": share_sent(sizes.context) * prediction.cost.context,
        "tensor": share_sent(sizes.tensor) * prediction.cost.tensor,
    }
    return MeshPrediction(
        sizes,
        None,
        rows,
        -(-rows // micro),
        (),
        (prediction.at_peak,),
        prediction.host,
        0.0,
        prediction.cost.seconds(),
        {axis: amount for axis, amount in traffic.items() if amount},
        prediction.cost,
    )


def count_averaged(training: Training, sizes: AxisSizes, gradients: int) -> float:
    """Count the bytes in which replicas send their gradients: 2 for each number by `compress`, for which gradients that
    are in BF16 already are no smaller. gradients: their bytes."""
    is_compressed = training.mesh.compress is not None and sizes.shard == sizes.tensor == 1
    return gradients / 2 if is_compressed and "pure-bf16" not in training.components().techniques else gradients


def predict_stages(job: MeshJob, sizes: AxisSizes, schedule: ScheduleName, simulated: Simulated) -> MeshPrediction:
    """Predict a mesh with a pipeline: each of its ranks takes what its stages take, in the order of the schedule."""
    layout = arrange_stages(job, sizes, schedule)
    find: Callable[[Case], Any] = simulated.__getitem__
    footprints = [
        combine_footprints((weight, find(case)) for weight, case in list_stage_cases(layout, stage, sizes.tensor))
        for stage in range(len(layout.layers))
    ]
    events = order_events(schedule, sizes.pipeline, layout.micro_batches)
    shards = sizes.shard if sizes.shard * sizes.replicate > 1 else None
    parts = [
        {stage: footprints[stage] for stage, place in enumerate(layout.places) if place == rank}
        for rank in range(sizes.pipeline)
    ]
    places, last = layout.places, len(layout.layers) - 1
    tied = job.tied / sizes.tensor
    peaks = [
        StageWalk(
            part, places, layout.micro_batches, schedule != "1f1b", shards, tied if {0, last} <= set(part) else 0.0
        ).run(order)
        for part, order in zip(parts, events, strict=True)
    ]
    costs = [count_cost(order, footprints) for order in events]
    steps = [sum_costs((1 / (shards or 1), footprint.stepping) for footprint in part.values()) for part in parts]
    bubble = find_bubble(schedule, sizes.pipeline, layout.micro_batches, footprints)
    sent = [count_sent(layout, part, sizes, cost, tied) for part, cost in zip(parts, costs, strict=True)]
    slowest = max(costs, key=StepCost.seconds)
    return MeshPrediction(
        sizes,
        schedule,
        count_rows(job.training, sizes),
        layout.micro_batches,
        tuple(sum(layout.layers[stage] for stage in part) for part in parts),
        tuple({kind: round(float(amount)) for kind, amount in zip(CATEGORIES, peak, strict=True)} for peak in peaks),
        0,
        bubble,
        slowest.seconds() / (1 - bubble) + max(step.seconds() for step in steps),
        max(sent, key=lambda traffic: sum(traffic.values())),
        slowest,
    )


def count_cost(events: RankEvents, footprints: Sequence[StageFootprint]) -> StepCost:
    """Count the cost of what a rank does in a step."""
    numbers = np.bincount(events.order, minlength=len(events.kinds)).tolist()
    return sum_costs(
        (number, footprints[event.stage].passes[event.kind])
        for number, event in zip(numbers, events.kinds, strict=True)
        if event.kind in footprints[event.stage].passes
    )


def find_bubble(schedule: ScheduleName, ranks: int, micro_batches: int, footprints: Sequence[StageFootprint]) -> float:
    """Return the share of the time in which equal stages wait for each other; of `zbv`, whose order is not that of
    equal passes with checkpoints, that in which the busiest rank waits."""
    if schedule != "zbv":
        return compute_bubble(schedule, ranks, micro_batches)
    actions = order_actions(schedule, ranks, micro_batches)
    span, busy = time_actions(actions, lambda kind, stage: footprints[stage].passes[kind].seconds(), len(footprints))
    return 1 - max(busy) / span


def count_sent(
    layout: StageLayout, footprints: Mapping[int, StageFootprint], sizes: AxisSizes, cost: StepCost, tied: float
) -> dict[Axis, float]:
    """Count the bytes that a rank of a pipeline sends in a step, by axis: hidden states and their gradients, the
    gradients of tied weights, weights that are gathered once and gradients that are reduced once, and the outputs of
    parts of layers. footprints: of its stages. tied: bytes of the weights that the first and the last stage share."""
    places = layout.places
    ends = {stage: sends_back(places, stage) + sends_on(places, stage) for stage in footprints}
    hidden = sum(ends[stage] * part.hidden for stage, part in footprints.items())
    is_one_end = len({0, len(places) - 1} & footprints.keys()) == 1
    weights = sum(float(part.held[PARAMETERS]) for part in footprints.values())
    gradients = sum(float(part.gradients[GRADIENTS]) for part in footprints.values())
    sent: dict[Axis, float] = {
        "pipeline": layout.micro_batches * hidden + is_one_end * tied / sizes.shard,
        "replicate": 2 * share_sent(sizes.replicate) * gradients / sizes.shard,
        "shard": share_sent(sizes.shard) * (weights + gradients),
        "tensor": share_sent(sizes.tensor) * cost.tensor,
    }
    return {axis: amount for axis, amount in sent.items() if amount}


def share_sent(ranks: int) -> float:
    """Return the share of a tensor that a rank sends in a ring of so many, where each gathers all of it."""
    return (ranks - 1) / ranks
