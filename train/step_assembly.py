"""From settings to the parts of a training step: the same for training, for simulating a step, and for timing it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from laconic.errors import RecipeError
from train.offload.host_memory import HostMemory
from train.optimizers.optimizer import Groups, parameter_groups
from train.optimizers.weight_average import average_weights
from train.parallel.context_parallel import check_context, spread_rows
from train.parallel.data_parallel import replicate_model
from train.parallel.deepspeed_zero import shard_by_deepspeed
from train.parallel.fully_sharded import shard_parameters
from train.parallel.pipeline import Pipeline, PipelineSettings
from train.parallel.ranks import Ranks, RanksStrategy
from train.parallel.tensor_parallel import split_layers
from train.parallel.tensor_plan import make_plan
from train.settings import Training, TrainingComponents
from train.step.compatibility import SLOTS, find_conflict
from train.step.objective import Objective
from train.step.parameter_settings import freeze_parameters, make_rate_scale, scale_rates
from train.step.step_parts import StepParts
from train.step.technique import Technique


def make_step_parts(
    module: nn.Module,
    objective: Objective,
    components: TrainingComponents,
    device: torch.device,
    *,
    sharded: bool = False,
    tensor: DeviceMesh | None = None,
    sequence: bool = False,
    context: DeviceMesh | None = None,
    pipeline: PipelineSettings | None = None,
) -> StepParts:
    """Make the parts of a step with every technique applied, not assembled yet.

    sharded: whether the weights are to be sharded, so that no device ever holds all of them. tensor: the ranks that
    compute a part of every layer each. sequence: whether these have a part of the positions each between attention and
    FFN. context: the ranks that have a part of the positions each of the same rows. pipeline: how the layers are cut
    into stages, of which this rank keeps some. The module is changed in place: training mode, gradients for every
    floating-point parameter, float32. Raises RecipeError for a model that these do not divide.
    """
    check_parts(module, objective, is_cut=tensor is not None or pipeline is not None, context=context)
    train_everything(module)
    plan = make_plan(module, tensor.size()) if tensor is not None else None
    stages = pipeline.make_plan(module, objective) if pipeline is not None else None
    frozen = freeze_parameters(module, components.parameters.freeze)
    builders = make_optimizer_builders(module, components)
    elsewhere = any(tensor.device != device for tensor in (*module.parameters(), *module.buffers()))
    techniques = sort_by_slot(components.techniques)
    is_placed = sharded or tensor is not None or any(technique.places_weights for technique in techniques)
    if elsewhere and not is_placed and pipeline is None:
        module.to(device)
    parts = StepParts(module, objective, *builders, device, HostMemory(device))
    parts.on_restore(partial(unfreeze_parameters, frozen))
    first = [technique for technique in techniques if SLOTS.index(technique.slot) <= SLOTS.index("weights")]
    for technique in first:
        technique.apply(parts)
    if pipeline is not None and stages is not None:
        parts.parallelize(pipeline.build(parts, stages))
        if not is_placed:
            module.to(device)
    if tensor is not None and plan is not None:
        split_layers(parts, plan.select(module), tensor, sequence=sequence)
    for technique in techniques[len(first) :]:
        technique.apply(parts)
    if context is not None:
        spread_rows(parts, context)
    return parts


def train_everything(module: nn.Module) -> None:
    """Set a module to training mode, with gradients for every floating-point parameter."""
    module.train()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def unfreeze_parameters(frozen: Sequence[nn.Parameter]) -> None:
    """Give parameters their gradients back."""
    for parameter in frozen:
        parameter.requires_grad_(True)


def check_parts(module: nn.Module, objective: Objective, *, is_cut: bool, context: DeviceMesh | None) -> None:
    """Raise RecipeError where an objective needs a whole model on each rank, or whole rows."""
    if context is not None:
        check_context(module, objective, context)
    if is_cut and not objective.takes_parts_of_layers:
        raise RecipeError(
            "mesh: preferences are learned by a whole model on each rank, and tensor or pipeline cuts it. Leave it out"
        )


def make_optimizer_builders(
    module: nn.Module, components: TrainingComponents
) -> tuple[Callable[[Groups], Optimizer], Callable[[nn.Module], Groups]]:
    """Make what builds the optimizer of groups of parameters, and what groups those of a module. module: before
    techniques, by whose layers learning rates are scaled."""
    optimizer, decay = components.optimizer, components.parameters.layer_decay
    scale = make_rate_scale(module, decay) if decay is not None else None

    def build(groups: Groups) -> Optimizer:
        made = optimizer.build(groups)
        return made if components.ema is None else average_weights(made, components.ema)

    def group(module: nn.Module) -> Groups:
        groups = parameter_groups(module, optimizer.weight_decay)
        return scale_rates(module, groups, optimizer.lr, scale) if scale else groups

    return build, group


def distribute_step(parts: StepParts, training: Training, ranks: Ranks) -> None:
    """Replicate or shard the model over the ranks, which train as one on their parts of each batch. Every rank calls
    it, after all techniques are applied and layers are cut.

    The loss of a step is the mean over the whole batch, and so is its gradient. Raises RecipeError where mesh,
    techniques, optimizer or task cannot be combined.
    """
    if not ranks.is_group:
        return
    components, mesh = training.components(), training.mesh
    if conflict := find_conflict(components.techniques, components.optimizer, parallelism=mesh.parallelism):
        raise RecipeError(conflict)
    if not parts.objective.splittable and ranks.data_world > 1:
        raise RecipeError(
            "mesh: this task compares the rows of a batch with one another, and each rank sees its own alone. Train on "
            "one device"
        )
    if isinstance(parts.strategy, Pipeline):
        parts.strategy.distribute(parts, ranks, training.batch_size, mesh)
        return
    rows = parts.micro_batch_rows
    micro_batches = ceil(ceil(training.batch_size / ranks.data_world) / rows) if rows else 1
    if mesh.zero is not None:
        shard_by_deepspeed(parts, ranks, micro_batches, mesh.zero, training.max_grad_norm)
    elif ranks.axes is None:
        replicate_model(parts, ranks, micro_batches, mesh.compress)
    elif (shards := ranks.select_axes("replicate", "shard")) is not None:
        shard_parameters(parts, ranks, shards, micro_batches, mesh)
    else:
        parts.parallelize(RanksStrategy(ranks, micro_batches))


def sort_by_slot(techniques: Mapping[str, Technique]) -> list[Technique]:
    """Sort the techniques into the order in which they are applied."""
    return sorted(techniques.values(), key=lambda technique: SLOTS.index(technique.slot))
