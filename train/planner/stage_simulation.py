"""Simulating a stage of a pipeline, which two micro-batches pass."""

import copy
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from laconic.errors import RecipeError
from train.offload.memory_accounting import CATEGORIES
from train.parallel.mesh import AxisSizes, Mesh
from train.parallel.pipeline import PipelineSettings
from train.parallel.ranks import Ranks
from train.parallel.simulated_pipeline import INPUTS, PASSES, WEIGHTS, SimulatedPipeline
from train.parallel.stage_plan import TracedModel, find_stage_layers, trace_model
from train.parallel.stage_weights import StagePlan
from train.planner.depth_extrapolation import copy_shallow, truncate_stack
from train.planner.device_rates import DeviceRates
from train.planner.memory_timeline import MemoryTimeline
from train.planner.mesh_cases import MeshJob
from train.planner.meta_model import MetaModel
from train.planner.simulate import fakify, make_fake_mode, open_fake_process_group, simulate
from train.planner.simulated_cost import cost_optimizer, name_groups
from train.planner.stage_footprint import Bytes, StageCase, StageFootprint
from train.planner.step_cost import STEPPING, CostMeter, StepCost
from train.settings import Training
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step_assembly import make_step_parts


def make_job(model: MetaModel, training: Training, length: int, rates: DeviceRates) -> MeshJob:
    """Make the job of the cases of a model, which is traced for its stages."""
    try:
        traced = trace_structure(model, training, length)
    except RecipeError as error:
        return MeshJob(model, training, length, rates, None, str(error))
    named = model.module.named_parameters(remove_duplicate=False)
    tied = {weight for name, weight in named if name in traced.before & traced.after}
    return MeshJob(model, training, length, rates, traced, tied=sum(weight.nbytes for weight in tied))


def trace_structure(model: MetaModel, training: Training, length: int) -> TracedModel:
    """Trace a model without weights, of which layers are alike. Raises RecipeError."""
    layers = find_stage_layers(model.module)
    shapes = {tuple((name, weight.shape) for name, weight in layer.named_parameters()) for layer in layers}
    if len(shapes) > 1 or training.freeze:
        reason = "freeze leaves out some" if training.freeze else "have other shapes than others"
        raise RecipeError(
            f"mesh: pipeline: the stages of {model.name} cannot be predicted from a few, since layers {reason}. Plan "
            f"without pipeline"
        )
    objective = model.objective()
    if not objective.splittable:
        raise RecipeError("mesh: pipeline: this task compares the rows of a batch with one another. Leave pipeline out")
    module = copy_shallow(model.module)
    with make_fake_mode():
        shallow = trace_model(fakify(module), objective, objective.make_example(1, length))
    before, first, *_, last, after = shallow.flops
    flops = (before, first, *[last] * (len(layers) - 1), after)
    return TracedModel(flops, shallow.before, shallow.after, shallow.values)


def simulate_stage(job: MeshJob, case: StageCase) -> StageFootprint:
    """Simulate a stage of a model whose layers are alike."""
    assert job.traced is not None
    model, training, rates = job.model, job.training, job.rates
    plan, number = plan_case(case, job.traced)
    states: list[TrainState] = []
    with open_fake_process_group(case.tensor), truncate_stack(model.module, plan.layers[-1].stop):
        axes = init_device_mesh("cpu", (case.tensor,), mesh_dim_names=("tensor",)) if case.tensor > 1 else None
        ranks = Ranks(0, case.tensor, torch.device("cpu"), AxisSizes(len(plan.layers), tensor=case.tensor), axes)
        module = copy.deepcopy(model.module)
        objective = model.objective()

        def prepare() -> tuple[TrainState, Batch]:
            fakify(module)
            batch = objective.make_example(PASSES * case.rows, job.length)
            group = dist.group.WORLD
            assert group is not None
            pipeline = PipelineSettings(group, len(plan.layers), number, "gpipe", batch, plan, SimulatedPipeline)
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
    passes = count_passes(meter, case)
    stepping = stepping.plus(meter.phases.get("optimizer", StepCost()))
    return measure_footprint(timeline, case, state.strategy.hidden_bytes, passes, stepping)


def plan_case(case: StageCase, traced: TracedModel) -> tuple[StagePlan, int]:
    """Return stages of which one is that of a case, and its number."""
    before = [] if case.place == "first" else [1]
    counts = [*before, case.layers, *([] if case.place == "last" else [1])]
    edges = [sum(counts[:index]) for index in range(len(counts) + 1)]
    layers = tuple(range(start, stop) for start, stop in pairwise(edges))
    return StagePlan(layers, (1.0,) * len(layers), traced.before, traced.after, traced.values), len(before)


def count_passes(meter: CostMeter, case: StageCase) -> dict[str, StepCost]:
    """Count the cost of a pass of one micro-batch, by the kind of action. With checkpoints both parts of a backward
    pass compute again what these saved, the second one for each group of weights."""
    phases = {"F": "forward", "B": "backward", "I": INPUTS, "W": WEIGHTS}
    times = {"F": PASSES + (case.place != "first"), "B": PASSES, "I": 1, "W": 1}
    passes = {
        kind: StepCost().plus(meter.phases.get(phase, StepCost()), 1 / times[kind]) for kind, phase in phases.items()
    }
    # torch leaves all of the first stage's backward pass to the second part.
    return passes | {"W": passes["B"]} if case.place == "first" else passes


def measure_footprint(
    timeline: MemoryTimeline,
    case: StageCase,
    hidden: int,
    passes: Mapping[str, StepCost],
    stepping: StepCost,
) -> StageFootprint:
    """Measure what each pass of a simulated stage takes."""
    phases = ("forward", "backward", INPUTS, WEIGHTS, "optimizer")
    spans = [span for span in timeline.list_spans() if span[0] in phases and span[1] < span[2]]
    begin, again, first, second, *rest = spans
    parts = [span for span in rest if span[0] in (INPUTS, WEIGHTS)]
    rest = [span for span in rest if span[0] in ("backward", "optimizer")]

    def before(span: tuple[str, int, int]) -> Bytes:
        return count_bytes(timeline, span[1] - 1)

    def grown(span: tuple[str, int, int]) -> Bytes:
        return count_bytes(timeline, span[2] - 1) - before(span)

    def peak(span: tuple[str, int, int]) -> Bytes:
        _, start, stop = span
        return count_bytes(timeline, start + int(timeline.device[start:stop].argmax())) - before(span)

    buffers = np.zeros(len(CATEGORIES))
    buffers[CATEGORIES.index("activations")] = PASSES * hidden * (1 if case.place != "middle" else 2)
    saved, nothing = grown(again), np.zeros(len(CATEGORIES))
    return StageFootprint(
        held=before(begin) - buffers,
        gradients=grown(first) + saved,
        saved=saved,
        forward=peak(again),
        first_backward=peak(first),
        backward=peak(second),
        inputs=peak(parts[0]) if parts else nothing,
        weights=peak(parts[1]) if parts else peak(second),
        between=grown(parts[0]) if parts else nothing,
        optimizer=max(map(peak, rest), key=np.sum),
        hidden=float(hidden),
        passes=passes,
        stepping=stepping,
    )


def count_bytes(timeline: MemoryTimeline, event: int) -> Bytes:
    """Count the device's bytes by category after an event."""
    return np.array(list(timeline.at(event).values()), np.float64)
