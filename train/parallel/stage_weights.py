"""The weights of a pipeline's stages: a rank keeps its own, and gets all of them back when training is over."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.models.repeated_layers import find_layer_lists
from train.step.gradient_norm import to_shard


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut. layers: of each stage, by their numbers. costs: FLOPs of a forward pass of each stage.
    before, after: names of the parameters that are used before the first layer, and after the last one; tied ones are
    in both. values: how many values a layer returns in a tuple; 0 for the hidden states alone."""

    layers: tuple[range, ...]
    costs: tuple[float, ...]
    before: frozenset[str]
    after: frozenset[str]
    values: int

    def find_stages(self, name: str) -> tuple[int, ...]:
        """Return the stages that have a parameter outside of the layers: the first, the last or both. One that was
        added after the plan was made, as of an adapter, is where its neighbours are; one that is never used is in the
        last stage."""
        known = self.before | self.after
        if name not in known:
            homes = {other.rpartition(".")[0]: other for other in known}
            around = [home for home in homes if name.startswith(f"{home}.")]
            name = homes[max(around, key=len)] if around else name
        stages = (0,) if name in self.before else ()
        return (*stages, len(self.layers) - 1) if name in self.after or not stages else stages


@dataclass(frozen=True, eq=False)
class PlacedWeight:
    """A parameter of the whole model. part, name: where it is. parameter: before other ranks' weights were dropped.
    stages: that have it. in_layer: whether it is in a layer."""

    part: nn.Module
    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]
    in_layer: bool


def place_weights(module: nn.Module, plan: StagePlan) -> list[PlacedWeight]:
    """List the parameters of a model with their stages, those that are used twice as often."""
    (layers,) = find_layer_lists(module)
    numbers = {part: number for number, layer in enumerate(layers.children()) for part in layer.modules()}
    stage_of = {number: stage for stage, members in enumerate(plan.layers) for number in members}

    def place(path: str, part: nn.Module) -> Iterator[PlacedWeight]:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                number = numbers.get(part)
                found = plan.find_stages(f"{path}.{name}".lstrip(".")) if number is None else (stage_of[number],)
                yield PlacedWeight(part, name, parameter, found, number is not None)

    return [weight for path, part in module.named_modules() for weight in place(path, part)]


def copy_skeleton(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy a model without its weights, which are all zero in the copy: to find the shape of its hidden states."""
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(make_zeros(parameter, device), requires_grad=False)
        for parameter in module.parameters()
    }
    memo |= {id(buffer): buffer for buffer in module.buffers()}
    return copy.deepcopy(module, memo).eval()


def make_zeros(like: Tensor, device: torch.device) -> Tensor:
    """Make zeros of the shape of a tensor, in the memory of a single one."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)


@contextmanager
def hide_weights(weights: Iterable[PlacedWeight], device: torch.device) -> Iterator[None]:
    """Have zeros in the place of weights in the body, where the model's code runs them and nothing is made of it. Those
    of a rank's other stage may be in shards meanwhile, which do not compute with whole tensors."""
    places: list[tuple[dict[str, Any], str]] = []
    for weight in weights:
        parameter = weight.part._parameters.get(weight.name)
        if parameter is not None:  # an attribute of the instance is found before a parameter
            weight.part.__dict__[weight.name] = make_zeros(parameter, device)
            places.append((weight.part.__dict__, weight.name))
    try:
        yield
    finally:
        for attributes, name in places:
            del attributes[name]


def drop_other_weights(
    weights: Sequence[PlacedWeight], stages: Collection[int], device: torch.device
) -> Callable[[dist.ProcessGroup, Sequence[int]], None]:
    """Drop the parameters that no stage of this rank has. In the place of those that are outside of layers zeros stay,
    since the model's code runs them before it comes to the layers. Returns a function that brings the weights back.
    """
    for weight in weights:
        if set(weight.stages).isdisjoint(stages):
            zeros = make_zeros(weight.parameter, device)
            del weight.part._parameters[weight.name]
            if not weight.in_layer:
                setattr(weight.part, weight.name, zeros)
    shapes = {weight.parameter: weight.parameter.shape for weight in weights}
    kept = {weight.parameter for weight in weights if not set(weight.stages).isdisjoint(stages)}
    for weight in weights:
        if weight.parameter not in kept:
            weight.parameter.data = weight.parameter.new_empty(0)

    def restore(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Give each rank of the group all weights. ranks: of each stage. They pass through the host's memory, which
        holds whole models as well before a run begins."""
        done: set[nn.Parameter] = set()
        for weight in weights:
            parameter = weight.parameter
            if parameter not in done:
                done.add(parameter)
                is_here = parameter in kept
                value = parameter.detach().cpu() if is_here else torch.empty(shapes[parameter], dtype=parameter.dtype)
                value = value.contiguous()
                dist.broadcast(value, group=group, group_src=ranks[weight.stages[0]])
                parameter.data = value
            weight.part.__dict__.pop(weight.name, None)
        for part in {weight.part: None for weight in weights}:
            own = {weight.name: weight.parameter for weight in weights if weight.part is part}
            part._parameters = {**own, **{name: part._parameters[name] for name in part._parameters if name not in own}}

    return restore


def sum_gradients(weights: Sequence[PlacedWeight], group: dist.ProcessGroup, peer: int) -> None:
    """Sum the gradients of tied weights over this rank and another, which has them too."""
    for weight in weights:
        parameter = weight.part._parameters[weight.name]
        if parameter is None or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
            # That of an embedding is whole on each rank, and that of a head is in shards.
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        own = to_shard(parameter.grad)
        other = torch.empty_like(own)
        sending = dist.P2POp(dist.isend, own, group=group, group_peer=peer)
        receiving = dist.P2POp(dist.irecv, other, group=group, group_peer=peer)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        own.add_(other)
