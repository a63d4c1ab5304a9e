"""The memory and the time that a combination of techniques takes, predicted by simulating a training step."""

import copy
from dataclasses import replace
from math import ceil

import torch
from torch import nn

from laconic.errors import RecipeError
from train.offload.memory_accounting import CATEGORIES, Category, account_as
from train.parallel.ranks import Ranks
from train.planner.depth_extrapolation import (
    extrapolate,
    find_depth,
    name_part,
    simulated_depths,
    truncate_stack,
)
from train.planner.device_rates import DeviceRates
from train.planner.memory_prediction import MemoryPrediction, count_rows, sum_categories
from train.planner.memory_timeline import MemoryTimeline
from train.planner.meta_model import MetaModel
from train.planner.simulate import fakify, open_fake_process_group, simulate
from train.planner.simulated_cost import cost_optimizer, name_groups
from train.planner.step_cost import STEPPING, CostMeter, StepCost
from train.settings import Training, TrainingComponents
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step_assembly import distribute_step, make_step_parts

MICRO = 2
"""Micro-batches that are simulated: the second and all later ones add to the gradients of the first."""


def predict(
    model: MetaModel,
    training: Training,
    length: int,
    rates: DeviceRates,
    *,
    whole: bool = False,
    ranks: Ranks | None = None,
) -> MemoryPrediction:
    """Simulate a step of `training.batch_size` rows of `length` tokens, on one device, or on the first of several
    ranks.

    A deep stack of equal layers is simulated at two small depths, and extrapolated linearly, part by part; `whole`
    simulates all layers. Raises RecipeError where the model does not support the techniques.
    """
    parts = training.components()
    linear = all(technique.is_linear_in_depth for technique in parts.techniques.values())
    linear = linear and not training.freeze  # layers by name, which a shallow copy need not have
    ranks = ranks or Ranks()
    depth = find_depth(model.module) if linear and not whole else None
    if depth is None:
        timeline, cost = simulate_step(model.copy(), model, training, parts, length, rates, ranks)
        host = int(timeline.host.max(initial=0))
        peaks = timeline.find_peaks(" ".join)
        parts_at = {name: timeline.at(event) for name, event in peaks.items()}
        return MemoryPrediction(timeline.peak(), host, timeline.at_peak(), parts_at, cost, timeline)
    simulated = []
    for layers in simulated_depths():
        with truncate_stack(model.module, layers):
            module = copy.deepcopy(model.module)
        simulated.append(simulate_step(module, model, training, parts, length, rates, ranks))
    return extrapolate_prediction(simulated, depth)


def predict_rank(
    model: MetaModel, training: Training, length: int, rates: DeviceRates, world: int, *, whole: bool = False
) -> MemoryPrediction:
    """Predict a step of the first of `world` ranks, which needs as much memory as any. One process simulates it: no
    other rank exists, and nothing is sent. `training.batch_size` is the global batch.

    The time is that of the computation alone: communication depends on what connects the ranks. whole: as in `predict`.
    Raises RecipeError where the mesh does not fit so many ranks, or the batch has fewer rows than there are ranks with
    rows of their own. The mesh has no pipeline: `predict_mesh` is for those.
    """
    sizes = training.mesh.resolve(world)
    count_rows(training, sizes)
    with open_fake_process_group(world):
        ranks = Ranks.of(0, world, torch.device("cpu"), training.mesh)
        return predict(model, training, length, rates, whole=whole, ranks=ranks)


def predict_per_device(
    model: MetaModel, training: Training, length: int, rates: DeviceRates, devices: int, *, whole: bool = False
) -> MemoryPrediction:
    """Predict a step of one device, where `devices` of them share the batch. Raises RecipeError for a pipeline, whose
    ranks differ."""
    if devices == 1:
        return predict(model, training, length, rates, whole=whole)
    if training.mesh.pipeline > 1:
        raise RecipeError(
            "mesh: pipeline: its ranks take unequal memory, which a plan of techniques has no place for. Plan the mesh "
            "with --link, or with pipeline: 1"
        )
    return predict_rank(model, training, length, rates, devices, whole=whole)


def simulate_step(
    module: nn.Module,
    model: MetaModel,
    training: Training,
    parts: TrainingComponents,
    length: int,
    rates: DeviceRates,
    ranks: Ranks,
) -> tuple[MemoryTimeline, StepCost]:
    """Simulate one step of the module, which may be a shallow copy of the model's, for its memory timeline and cost."""
    rows, times = ceil(training.batch_size / ranks.data_world), 1.0
    if parts.micro_batch is not None and rows > MICRO * parts.micro_batch:
        times = rows / (MICRO * parts.micro_batch)
        rows = MICRO * parts.micro_batch

    states: list[TrainState] = []

    def prepare() -> tuple[TrainState, Batch]:
        objective = model.objective()
        places = any(technique.places_weights for technique in parts.techniques.values())
        with account_as("host" if places else "device"):
            fakify(module)
        mesh, tensor = training.mesh, ranks.select_axes("tensor")
        step = make_step_parts(
            module,
            objective,
            parts,
            torch.device("cpu"),
            sharded=mesh.is_sharded,
            tensor=tensor,
            sequence=mesh.sequence,
            context=ranks.context,
        )
        # No more micro-batches than are simulated.
        distribute_step(step, training.model_copy(update={"batch_size": rows * ranks.data_world}), ranks)
        state = step.assemble()
        states.append(state)
        return state, objective.make_example(rows, length)

    meter = CostMeter(rates, name_groups(ranks))
    timeline = simulate(prepare, meter=meter, clip=training.max_grad_norm)
    cost = cost_optimizer(states[0], parts, meter.phases.pop(STEPPING, StepCost()), rates)
    for phase, part in meter.phases.items():
        cost = cost.plus(part, times if phase in ("forward", "backward") else 1.0)
    return timeline, cost


def extrapolate_prediction(simulated: list[tuple[MemoryTimeline, StepCost]], depth: int) -> MemoryPrediction:
    """Extrapolate the prediction for a deep model from the simulations of two shallow ones."""
    (low, low_cost), (high, high_cost) = simulated
    peaks = [timeline.find_peaks(name_part) for timeline in (low, high)]
    parts: dict[str, dict[Category, int]] = {}
    for name in sorted(peaks[0].keys() & peaks[1].keys()):
        before, after = low.at(peaks[0][name]), high.at(peaks[1][name])
        parts[name] = {kind: round(extrapolate((before[kind], after[kind]), depth)) for kind in CATEGORIES}
    at_peak = max(parts.values(), key=sum_categories)
    host = extrapolate((float(low.host.max(initial=0)), float(high.host.max(initial=0))), depth)
    a, b = simulated_depths()
    cost = replace(low_cost).plus(high_cost.plus(low_cost, -1.0), (depth - a) / (b - a))
    return MemoryPrediction(sum_categories(at_peak), round(host), at_peak, parts, cost)
