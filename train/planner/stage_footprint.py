"""The memory and the time that a stage of a pipeline takes, found by simulating two micro-batches that pass it."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh

from train.offload.memory_accounting import CATEGORIES
from train.parallel.mesh import AxisSizes, Mesh
from train.parallel.pipeline import PipelineSettings
from train.parallel.ranks import Ranks
from train.parallel.simulated_pipeline import PASSES, SimulatedPipeline
from train.parallel.stage_plan import StagePlan, TracedModel
from train.planner.depth_extrapolation import truncate_stack
from train.planner.device_rates import DeviceRates
from train.planner.memory_timeline import MemoryTimeline
from train.planner.meta_model import MetaModel
from train.planner.prediction import cost_optimizer, name_groups
from train.planner.simulate import fakify, open_fake_process_group, simulate
from train.planner.step_cost import STEPPING, CostMeter, StepCost
from train.settings import Training
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step_assembly import make_step_parts

Place = Literal["first", "middle", "last"]
"""Where a stage is: the first has the embedding, and the last the head and the loss."""
Bytes = NDArray[np.float64]
"""Bytes by category, [categories]."""


@dataclass(frozen=True)
class StageCase:
    """A stage that is simulated. layers: that it has. rows: of a micro-batch. tensor: ranks that have a part of its
    layers each, of which it is the first."""

    place: Place
    layers: int
    rows: int
    tensor: int


@dataclass(frozen=True)
class StageFootprint:
    """What a stage takes. Bytes are [categories].

    held: by its weights, buffers and the optimizer's state. gradients: when there are any. saved: for the backward pass
    of one micro-batch. forward, first_backward, backward, optimizer: at the peak of such a pass, beside what there was
    when it began; the first backward pass makes the gradients that others add to. hidden: bytes of the hidden states of
    a micro-batch. passes: the cost of the passes of one micro-batch. stepping: that of the optimizer.
    """

    held: Bytes
    gradients: Bytes
    saved: Bytes
    forward: Bytes
    first_backward: Bytes
    backward: Bytes
    optimizer: Bytes
    hidden: float
    passes: StepCost
    stepping: StepCost


def combine_footprints(terms: Iterable[tuple[float, StageFootprint]]) -> StageFootprint:
    """Return the weighted sum of footprints: between and beyond them, all figures are linear."""
    weights, parts = zip(*terms, strict=True)
    columns = zip(*(tuple(vars(part).values()) for part in parts), strict=True)
    totals: list[Any] = []
    for column in columns:
        pairs = list(zip(weights, column, strict=True))
        is_cost = isinstance(column[0], StepCost)
        totals.append(sum_costs(pairs) if is_cost else sum(weight * value for weight, value in pairs))
    return StageFootprint(*totals)


def sum_costs(terms: Iterable[tuple[float, StepCost]]) -> StepCost:
    """Return the weighted sum of costs."""
    result = StepCost()
    for weight, cost in terms:
        result = result.plus(cost, weight)
    return result


def simulate_stage(
    model: MetaModel, training: Training, traced: TracedModel, case: StageCase, length: int, rates: DeviceRates
) -> StageFootprint:
    """Simulate a stage. traced: of the model, whose layers must be alike."""
    plan, number = plan_case(case, traced)
    states: list[TrainState] = []
    with open_fake_process_group(case.tensor), truncate_stack(model.module, plan.layers[-1].stop):
        axes = init_device_mesh("cpu", (case.tensor,), mesh_dim_names=("tensor",)) if case.tensor > 1 else None
        ranks = Ranks(0, case.tensor, torch.device("cpu"), AxisSizes(len(plan.layers), tensor=case.tensor), axes)
        module = copy.deepcopy(model.module)
        objective = model.objective()

        def prepare() -> tuple[TrainState, Batch]:
            fakify(module)
            batch = objective.make_example(PASSES * case.rows, length)
            group = dist.group.WORLD
            assert group is not None
            pipeline = PipelineSettings(group, len(plan.layers), number, "gpipe", batch, plan)
            parts = make_step_parts(
                module,
                objective,
                training.components(),
                torch.device("cpu"),
                tensor=ranks.select_axes("tensor"),
                pipeline=pipeline,
            )
            assert isinstance(parts.strategy, SimulatedPipeline)
            parts.strategy.distribute(parts, ranks, PASSES * case.rows, Mesh(tensor=case.tensor, schedule="gpipe"))
            states.append(parts.assemble())
            return states[0], batch

        meter = CostMeter(rates, name_groups(ranks))
        timeline = simulate(prepare, meter=meter, clip=training.max_grad_norm)
    (state,) = states
    assert isinstance(state.strategy, SimulatedPipeline)
    stepping = cost_optimizer(state, training.components(), meter.phases.pop(STEPPING, StepCost()), rates)
    passes = sum_costs((1 / PASSES, meter.phases.get(phase, StepCost())) for phase in ("forward", "backward"))
    stepping = stepping.plus(meter.phases.get("optimizer", StepCost()))
    return measure_footprint(timeline, case, state.strategy.hidden_bytes, passes, stepping)


def plan_case(case: StageCase, traced: TracedModel) -> tuple[StagePlan, int]:
    """Return stages of which one is that of a case, and its number."""
    before = [] if case.place == "first" else [1]
    counts = [*before, case.layers, *([] if case.place == "last" else [1])]
    edges = [sum(counts[:index]) for index in range(len(counts) + 1)]
    layers = tuple(range(start, stop) for start, stop in pairwise(edges))
    return StagePlan(layers, (1.0,) * len(layers), traced.before, traced.after, traced.values), len(before)


def measure_footprint(
    timeline: MemoryTimeline,
    case: StageCase,
    hidden: int,
    passes: StepCost,
    stepping: StepCost,
) -> StageFootprint:
    """Measure what each pass of a simulated stage takes."""
    phases = ("forward", "backward", "optimizer")
    spans = [span for span in timeline.list_spans() if span[0] in phases and span[1] < span[2]]
    begin, again, first, second, *rest = spans

    def before(span: tuple[str, int, int]) -> Bytes:
        return count_bytes(timeline, span[1] - 1)

    def grown(span: tuple[str, int, int]) -> Bytes:
        return count_bytes(timeline, span[2] - 1) - before(span)

    def peak(span: tuple[str, int, int]) -> Bytes:
        _, start, stop = span
        return count_bytes(timeline, start + int(timeline.device[start:stop].argmax())) - before(span)

    buffers = np.zeros(len(CATEGORIES))
    buffers[CATEGORIES.index("activations")] = PASSES * hidden * (1 if case.place != "middle" else 2)
    saved = grown(again)
    return StageFootprint(
        held=before(begin) - buffers,
        gradients=grown(first) + saved,
        saved=saved,
        forward=peak(again),
        first_backward=peak(first),
        backward=peak(second),
        optimizer=max(map(peak, rest), key=np.sum),
        hidden=float(hidden),
        passes=passes,
        stepping=stepping,
    )


def count_bytes(timeline: MemoryTimeline, event: int) -> Bytes:
    """Count the device's bytes by category after an event."""
    return np.array(list(timeline.at(event).values()), np.float64)
