"""From settings to the kit of a step: the same for training, for simulating it, and for timing it."""

import torch
from torch import nn

from laconic.offload.host_memory import HostMemory
from laconic.training.optimizers import parameter_groups
from laconic.training.settings import Parts
from laconic.training.step.legality import ordered
from laconic.training.step.objective import Objective
from laconic.training.step.parts import Groups, Kit


def make_kit(
    module: nn.Module, objective: Objective, parts: Parts, device: torch.device, *, sharded: bool = False
) -> Kit:
    """The kit for a module that is to learn, with every technique applied and not yet assembled.

    sharded: whether the weights are to be cut over devices, and so never lie on one as a whole.
    The module is changed in place: training mode, gradients for every floating-point parameter, float32.
    """
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    module.train()
    elsewhere = any(tensor.device != device for tensor in (*module.parameters(), *module.buffers()))
    places = sharded or any(technique.places_weights for technique in parts.techniques.values())
    if elsewhere and not places:
        module.to(device)

    def groups(module: nn.Module) -> Groups:
        return parameter_groups(module, getattr(parts.optimizer, "weight_decay", 0.0))

    kit = Kit(
        module=module,
        objective=objective,
        make_optimizer=parts.optimizer.build,
        groups=groups,
        device=device,
        host=HostMemory(device),
    )
    for technique in ordered(parts.techniques):
        technique.apply(kit)
    return kit
