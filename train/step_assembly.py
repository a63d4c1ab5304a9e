"""From settings to the parts of a training step: the same for training, for simulating a step, and for timing it."""

from collections.abc import Mapping
from math import ceil

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.errors import RecipeError
from train.offload.host_memory import HostMemory
from train.optimizers.optimizer import Groups, parameter_groups
from train.optimizers.weight_average import average_weights
from train.parallel.data_parallel import replicate_model
from train.parallel.fully_sharded import shard_parameters
from train.parallel.ranks import Ranks
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
) -> StepParts:
    """Make the parts of a step with every technique applied, not assembled yet.

    sharded: whether the weights are to be sharded, so that no device ever holds all of them. The module is changed in
    place: training mode, gradients for every floating-point parameter, float32.
    """
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    chosen, optimizer = components.parameters, components.optimizer
    frozen = freeze_parameters(module, chosen.freeze)
    scale = make_rate_scale(module, chosen.layer_decay) if chosen.layer_decay is not None else None
    module.train()
    elsewhere = any(tensor.device != device for tensor in (*module.parameters(), *module.buffers()))
    places = sharded or any(technique.places_weights for technique in components.techniques.values())
    if elsewhere and not places:
        module.to(device)

    def group(module: nn.Module) -> Groups:
        groups = parameter_groups(module, optimizer.weight_decay)
        return scale_rates(module, groups, optimizer.lr, scale) if scale else groups

    def build(groups: Groups) -> Optimizer:
        made = optimizer.build(groups)
        return made if components.ema is None else average_weights(made, components.ema)

    def unfreeze() -> None:
        for parameter in frozen:
            parameter.requires_grad_(True)

    parts = StepParts(module, objective, build, group, device, HostMemory(device))
    parts.on_restore(unfreeze)
    for technique in sort_by_slot(components.techniques):
        technique.apply(parts)
    return parts


def distribute_step(parts: StepParts, training: Training, ranks: Ranks) -> None:
    """Replicate or shard the model over the ranks, which train as one on their parts of each batch. Every rank calls
    it, after all techniques are applied.

    The loss of a step is the mean over the whole batch, and so is its gradient. Raises RecipeError where mesh,
    techniques, optimizer or task cannot be combined.
    """
    if not ranks.is_group:
        return
    components, mesh = training.components(), training.mesh
    if conflict := find_conflict(components.techniques, components.optimizer, parallelism=mesh.parallelism):
        raise RecipeError(conflict)
    if not parts.objective.splittable and ranks.world > 1:
        raise RecipeError(
            "mesh: this task compares the rows of a batch with one another, and each rank sees its own alone. Train on "
            "one device"
        )
    rows = parts.micro_batch_rows
    micro_batches = ceil(ceil(training.batch_size / ranks.world) / rows) if rows else 1
    if ranks.axes is None:
        replicate_model(parts, ranks, micro_batches, mesh.compress)
    else:
        shard_parameters(parts, ranks, ranks.axes, micro_batches, mesh)


def sort_by_slot(techniques: Mapping[str, Technique]) -> list[Technique]:
    """Sort the techniques into the order in which they are applied."""
    return sorted(techniques.values(), key=lambda technique: SLOTS.index(technique.slot))
