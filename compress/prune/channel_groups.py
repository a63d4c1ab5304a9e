"""Groups of channels that a convolutional network can only lose together: coupled through sums, concatenations,
normalisations, depthwise and grouped convolutions, and into linear layers.

The dependency graph is Torch-Pruning's (Fang et al., DepGraph: Towards Any Structural Pruning, 2023). It only says
which channels are coupled; they are removed by Laconic's own code, whose result is compared with the masked model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch_pruning
from torch import Tensor, nn

from laconic.errors import LaconicError, SourceError, UsageError
from laconic.models.anatomy import anatomy
from laconic.models.signature import call

Axis = Literal["out", "in", "both"]
"""The output channels of a layer, its input channels, or both where each channel has separate weights."""

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
PER_CHANNEL = (*NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.PReLU)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KNOWN = (*PER_CHANNEL, *CONVOLUTIONS, *TRANSPOSED, nn.Linear, nn.Parameter)
LARGEST_GROUP = 5_000
"""Operations of a group, before Torch-Pruning merges those of one layer. Where an image is reshaped and split, as in
FocalNet, it lists one operation again and again, and the group of a tiny model was not complete in ten minutes."""
PRODUCTS = ("Bmm", "ScaledDot")
"""Autograd's names of the product of two activations, by which attention is recognised."""


@dataclass(frozen=True)
class GroupMember:
    """One axis of one layer, or of a parameter outside any layer, that holds the channels of a group.

    places: for each channel of the group, its indices on that axis: one, several where an image was flattened, or none.
    """

    path: str
    axis: Axis
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ChannelGroup:
    """Coupled channels of several layers. name: the path of the first layer that computes them. lanes: sets of channels
    that must stay equally large, since grouped convolutions divide the channels among their groups."""

    name: str
    members: tuple[GroupMember, ...]
    lanes: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """The number of channels."""
        return len(self.members[0].places)


def is_depthwise(layer: object) -> bool:
    """Whether a layer is a depthwise convolution."""
    return isinstance(layer, CONVOLUTIONS) and 1 < layer.groups == layer.in_channels == layer.out_channels


def find_channel_groups(module: nn.Module, inputs: Mapping[str, Tensor]) -> list[ChannelGroup]:
    """Return the channel groups of a module, in the order of its layers.

    inputs: a batch. Channels that reach an output without a layer in between are in no group, nor are channels that are
    normalised across each other; of a network with attention, nor are those of its transformer blocks. Raises
    UsageError for recurrent layers, and for a transformer.
    """
    refuse_recurrent(module)
    asked = {parameter: parameter.requires_grad for parameter in module.parameters()}
    module.requires_grad_(True)  # the graph is read from autograd
    try:
        with torch.enable_grad():
            attends = has_attention([answer.grad_fn for answer in call(module, inputs).values()])
            graph = torch_pruning.DependencyGraph()
            graph.build_dependency(
                module, dict(inputs), forward_fn=lambda m, x: list(call(m, x).values()), verbose=False
            )
        names: dict[Any, str] = {part: path for path, part in (*module.named_modules(), *module.named_parameters())}
        try:
            listed = list(enumerate_groups(graph, convolutional=attends))
        except GroupTooLarge:
            listed = list(enumerate_groups(graph, convolutional=True))
        converted = [convert_group(items, names) for items in listed]
    except LaconicError:
        raise
    except Exception as error:  # Torch-Pruning does not know every operation, and says so in many ways
        raise UsageError(
            f"which channels of this model are coupled was not found, as its operations are not all known to "
            f"Torch-Pruning ({type(error).__name__}: {' '.join(str(error).split())[:100]}). Use "
            f"{suggest_instead(module)}"
        ) from error
    finally:
        for parameter, before in asked.items():
            parameter.requires_grad_(before)
    order = list(names.values())
    taken: dict[str, ChannelGroup] = {}
    for group in converted:
        if group is not None:  # of two groups with the same first layer, one is named after another member
            name = group.members[0].path if group.name in taken else group.name
            taken[name] = replace(group, name=name)
    if attends and not taken:
        raise UsageError(
            f"prune.channels prunes convolutions, and this model has attention and no convolution whose channels "
            f"could go alone. Use {suggest_instead(module)}"
        )
    return sorted(taken.values(), key=lambda group: order.index(group.name))


class GroupTooLarge(Exception):
    """A group has more operations than are listed."""


class BoundedGroup(torch_pruning.dependency.group.Group):  # type: ignore[misc]
    """A group of Torch-Pruning that raises GroupTooLarge beyond LARGEST_GROUP operations."""

    def add_dep(self, dep: Any, idxs: Any) -> None:
        if len(self) >= LARGEST_GROUP:
            raise GroupTooLarge
        super().add_dep(dep, idxs)


@contextmanager
def bounded_groups() -> Iterator[None]:
    """Make Torch-Pruning list bounded groups within the context."""
    plain = torch_pruning.dependency.graph.Group
    torch_pruning.dependency.graph.Group = BoundedGroup
    try:
        yield
    finally:
        torch_pruning.dependency.graph.Group = plain


def enumerate_groups(graph: Any, *, convolutional: bool) -> Iterator[Sequence[Any]]:
    """Yield the items of each group of Torch-Pruning's dependency graph, as by its `get_all_groups`.

    convolutional: only of groups that convolutions compute and read. What may reach a transformer block by way of a
    reshaped image is not even listed: Torch-Pruning lists each pixel of each channel there, at every operation. For
    timm's coatnet_pico_rw_224 it had taken 12 GB when it was stopped.
    """
    seen: set[Any] = set()
    for layer in list(graph.module2node):
        if layer in seen or not isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)):
            continue
        pruner = graph.get_pruner_of_module(layer)
        if convolutional and reaches_block(graph.module2node[layer], pruner.prune_out_channels):
            continue
        with bounded_groups():
            items = graph.get_pruning_group(
                layer, pruner.prune_out_channels, list(range(pruner.get_out_channels(layer)))
            ).items
        seen.update(item.dep.target.module for item in items if graph.is_out_channel_pruning_fn(item.dep.handler))
        if not convolutional or is_convolutional([item.dep.target.module for item in items]):
            yield items


def reaches_block(node: Any, handler: Any) -> bool:
    """Whether the channels of a node of the dependency graph may be coupled, through a reshaped image, with layers that
    are no convolutions. handler: Torch-Pruning's pruning function of the node. Which channels is not asked."""
    seen, todo = set(), [(node, handler)]
    while todo:
        node, handler = step = todo.pop()
        if step not in seen:
            seen.add(step)
            todo += [(other.target, other.handler) for other in node.dependencies if other.is_triggered_by(handler)]
    reached = [node for node, _ in seen]
    reshaped = any(other.type == torch_pruning.ops.OPTYPE.RESHAPE for other in reached)
    return reshaped and not is_convolutional([other.module for other in reached])


def convert_group(items: Sequence[Any], names: Mapping[Any, str]) -> ChannelGroup | None:
    """Return a group of Torch-Pruning as a ChannelGroup; None if its channels cannot be removed."""
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
        axis = find_axis(layer, item.dep.handler.__name__)
        members.append(GroupMember(names[layer], axis, tuple(map(tuple, places))))
        if axis != "both" and isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) and layer.groups > 1:
            size = (layer.out_channels if axis == "out" else layer.in_channels) // layer.groups
            shared.append([tuple(place // size for place in entry) for entry in places])
    lanes: dict[tuple[Any, ...], list[int]] = {}
    for channel in range(width):
        lanes.setdefault(tuple(entry[channel] for entry in shared), []).append(channel)
    makers = [member.path for member in members if member.axis != "in"]
    if not any(member.axis == "in" for member in members) or len({len(lane) for lane in lanes.values()}) > 1:
        return None
    order = list(names.values())
    return ChannelGroup(min(makers, key=order.index), tuple(members), tuple(map(tuple, lanes.values())))


def find_axis(layer: object, handler: str) -> Axis:
    """Return the axis of the layer that Torch-Pruning's pruning function of this name prunes."""
    if isinstance(layer, (*PER_CHANNEL, nn.Parameter)) or is_depthwise(layer):
        return "both"
    return "out" if handler == "prune_out_channels" else "in"


def refuse_recurrent(module: nn.Module) -> None:
    """Raise UsageError for a module with recurrent layers."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            raise UsageError(
                f"prune.channels prunes convolutional networks, and {path or 'the model'} is a {type(layer).__name__}, "
                f"whose states have one width at every step. Use factorize.low-rank for the layers around it, or "
                f"prune.unstructured"
            )


def has_attention(roots: Sequence[Any]) -> bool:
    """Whether autograd's graph, from these nodes on, multiplies activations with activations."""
    seen, todo = set(), [node for node in roots if node is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if any(product in node.name() for product in PRODUCTS):
            return True
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    return False


def get_layer(module: nn.Module, path: str) -> nn.Module | nn.Parameter:
    """Return the layer or the parameter at a path."""
    owner, _, name = path.rpartition(".")
    layer = getattr(module.get_submodule(owner), name) if name else module
    assert isinstance(layer, (nn.Module, nn.Parameter))
    return layer


def is_convolutional(layers: Sequence[Any]) -> bool:
    """Whether those of Torch-Pruning's layers that have weights are convolutions, and what acts on each channel."""
    weighted = [layer for layer in layers if isinstance(layer, nn.Parameter) or list(layer.parameters())]
    return all(isinstance(layer, (*PER_CHANNEL, *CONVOLUTIONS, *TRANSPOSED)) for layer in weighted)


def suggest_instead(module: nn.Module) -> str:
    """Return the stages that prune a model whose channels cannot go."""
    try:
        blocks = anatomy(module)
    except SourceError:
        return "factorize.low-rank, or prune.unstructured"
    return " and ".join(f"prune.{kind}" for kind in blocks.sites[0])
