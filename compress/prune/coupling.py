"""Which channels of a convolutional network can only go together: through sums, concatenations, normalisations,
depthwise and grouped convolutions, and into linear layers.

The dependency graph is Torch-Pruning's (Fang et al., DepGraph, 2023). It is asked which channels are coupled, and no
more: what is done with them is ours, and is held against the masked model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch_pruning
from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.models.signature import call

Axis = Literal["out", "in", "both"]
"""Of a layer's channels: those it makes, those it takes, or, where each channel has weights of its own, both."""

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
PER_CHANNEL = (*NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.PReLU)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KNOWN = (*PER_CHANNEL, *CONVOLUTIONS, *TRANSPOSED, nn.Linear, nn.Parameter)
PRODUCTS = ("Bmm", "ScaledDot")
"""What autograd calls the product of two activations, by which attention is known."""


@dataclass(frozen=True)
class Member:
    """One axis of one layer, or of a parameter that is none's, that a group runs through.

    places: for each channel of the group, where it lies on that axis: in one place, or in several where an image was
    flattened, or in none.
    """

    path: str
    axis: Axis
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Group:
    """Channels that layers share. name: the path of the first layer that makes them. lanes: sets of channels of which
    all must stay equally large, since grouped convolutions share the channels out between them."""

    name: str
    members: tuple[Member, ...]
    lanes: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """How many channels there are."""
        return len(self.members[0].places)


def is_depthwise(layer: object) -> bool:
    """Whether each channel of a convolution goes its own way."""
    return isinstance(layer, CONVOLUTIONS) and 1 < layer.groups == layer.in_channels == layer.out_channels


def couple(module: nn.Module, inputs: Mapping[str, Tensor]) -> list[Group]:
    """The groups of channels of a module, in its order.

    inputs: a batch. What reaches an output without a layer in between is in no group, and so is what is normalised
    across channels. Raises UsageError for attention and for recurrent layers.
    """
    refuse_recurrent(module)
    asked = {parameter: parameter.requires_grad for parameter in module.parameters()}
    module.requires_grad_(True)  # the graph is read from autograd
    try:
        with torch.enable_grad():
            refuse_attention([answer.grad_fn for answer in call(module, inputs).values()])
            graph = torch_pruning.DependencyGraph()
            graph.build_dependency(
                module, dict(inputs), forward_fn=lambda m, x: list(call(m, x).values()), verbose=False
            )
        names: dict[Any, str] = {each: path for path, each in (*module.named_modules(), *module.named_parameters())}
        found = [as_group(each.items, names) for each in graph.get_all_groups()]
    finally:
        for parameter, before in asked.items():
            parameter.requires_grad_(before)
    order = list(names.values())
    taken: dict[str, Group] = {}
    for group in found:
        if group is not None:  # of two that share a first layer, one is called by another of its own
            name = group.members[0].path if group.name in taken else group.name
            taken[name] = replace(group, name=name)
    return sorted(taken.values(), key=lambda group: order.index(group.name))


def as_group(items: Sequence[Any], names: Mapping[Any, str]) -> Group | None:
    """Torch-Pruning's group as ours; None where it cannot be cut without a change of meaning."""
    members, shared = [], []
    width = len(items[0].idxs)
    for item in items:
        layer = item.dep.target.module
        if item.dep.target.type == torch_pruning.ops.OPTYPE.OUTPUT:
            return None
        if layer not in names:
            continue  # an operation without weights
        if not isinstance(layer, KNOWN):
            return None
        places: list[list[int]] = [[] for _ in range(width)]
        for root, place in zip(item.root_idxs, item.idxs, strict=True):
            places[root].append(place)
        axis = axis_of(layer, item.dep.handler.__name__)
        members.append(Member(names[layer], axis, tuple(map(tuple, places))))
        if axis != "both" and isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) and layer.groups > 1:
            size = (layer.out_channels if axis == "out" else layer.in_channels) // layer.groups
            shared.append([tuple(place // size for place in each) for each in places])
    lanes: dict[tuple[Any, ...], list[int]] = {}
    for channel in range(width):
        lanes.setdefault(tuple(each[channel] for each in shared), []).append(channel)
    makers = [member.path for member in members if member.axis != "in"]
    if not any(member.axis == "in" for member in members) or len({len(lane) for lane in lanes.values()}) > 1:
        return None
    order = list(names.values())
    return Group(min(makers, key=order.index), tuple(members), tuple(map(tuple, lanes.values())))


def axis_of(layer: object, handler: str) -> Axis:
    """Of the layer's channels, those that Torch-Pruning's function of this name cuts."""
    if isinstance(layer, (*PER_CHANNEL, nn.Parameter)) or is_depthwise(layer):
        return "both"
    return "out" if handler == "prune_out_channels" else "in"


def refuse_recurrent(module: nn.Module) -> None:
    """Raise UsageError where states are handed from step to step."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            raise UsageError(
                f"prune.channels cuts convolutional networks, and {path or 'the model'} is a {type(layer).__name__}, "
                f"whose states share one width from step to step. Take factorize.low-rank for the layers around it, or "
                f"prune.unstructured"
            )


def refuse_attention(roots: Sequence[Any]) -> None:
    """Raise UsageError where autograd's graph, from these nodes on, multiplies activations with activations."""
    seen, todo = set(), [node for node in roots if node is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if any(product in node.name() for product in PRODUCTS):
            raise UsageError(
                "prune.channels cuts convolutional networks, and this model has attention, whose heads a cut of "
                "channels would mix up without a sign of it. Take prune.heads and prune.ffn"
            )
        todo += [each for each, _ in node.next_functions if each is not None]
