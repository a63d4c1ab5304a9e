"""Removing channels from layers, and masking the same channels: both models must give the same outputs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from compress.prune.channel_groups import CONVOLUTIONS, PER_CHANNEL, TRANSPOSED, ChannelGroup, get_layer, is_depthwise


@dataclass(frozen=True)
class RemovedChannels:
    """The channels that one layer loses. rows: output channels, or all channels of a layer that has separate weights
    for each. columns: input channels."""

    rows: set[int] = field(default_factory=set)
    columns: set[int] = field(default_factory=set)


Removal = dict[str, RemovedChannels]
"""The channels that each layer loses, by its path."""


def collect_removed(chosen: Iterable[tuple[ChannelGroup, Iterable[int]]]) -> Removal:
    """Return what each layer loses when these channels of these groups are removed."""
    removal: Removal = {}
    for group, channels in chosen:
        for member in group.members:
            removed = removal.setdefault(member.path, RemovedChannels())
            side = removed.columns if member.axis == "in" else removed.rows
            side.update(place for channel in channels for place in member.places[channel])
    return removal


def remaining_indices(count: int, removed: Iterable[int]) -> Tensor:
    """Return the indices below `count` that are not removed, [n] int64."""
    stays = torch.ones(count, dtype=torch.bool)
    stays[sorted(removed)] = False
    return stays.nonzero().flatten()


def channel_axis(parameter: Tensor) -> int:
    """Return the axis of the channels of a parameter that belongs to no layer: the last that is longer than one."""
    return max((axis for axis, size in enumerate(parameter.shape) if size > 1), default=0)


def remove_channels(module: nn.Module, removal: Mapping[str, RemovedChannels]) -> None:
    """Remove these channels from the layers, in place. Raises RuntimeError for a layer that cannot lose them."""
    for path, removed in removal.items():
        layer = get_layer(module, path)
        if isinstance(layer, nn.Parameter):
            owner, _, name = path.rpartition(".")
            axis = channel_axis(layer)
            kept = select_indices(layer, axis, remaining_indices(layer.shape[axis], removed.rows))
            setattr(module.get_submodule(owner), name, kept)
        elif isinstance(layer, PER_CHANNEL):
            shrink_per_channel(layer, removed)
        elif is_depthwise(layer):
            shrink_per_channel(layer, removed)
            layer.in_channels = layer.groups = layer.out_channels
        elif isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
            shrink_convolution(layer, removed)
        else:
            assert isinstance(layer, nn.Linear)
            rows = remaining_indices(layer.out_features, removed.rows)
            columns = remaining_indices(layer.in_features, removed.columns)
            layer.weight = select_indices(select_indices(layer.weight, 0, rows), 1, columns)
            if layer.bias is not None:
                layer.bias = select_indices(layer.bias, 0, rows)  # type: ignore[assignment]
            layer.out_features, layer.in_features = len(rows), len(columns)


def shrink_per_channel(layer: nn.Module, removed: RemovedChannels) -> None:
    """Remove channels from a layer in which each has its own row of every parameter and buffer."""
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.ndim and len(tensor) > 1:  # neither one slope for all channels, nor the count of batches
            setattr(layer, name, select_indices(tensor, 0, remaining_indices(len(tensor), removed.rows)))
    for name in ("num_features", "num_parameters", "out_channels"):
        if getattr(layer, name, 1) > 1:
            setattr(layer, name, getattr(layer, name) - len(removed.rows))


def shrink_convolution(layer: nn.Module, removed: RemovedChannels) -> None:
    """Remove channels from a convolution, transposed or not, grouped or not."""
    assert isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED))
    rows = remaining_indices(layer.out_channels, removed.rows)
    columns = remaining_indices(layer.in_channels, removed.columns)
    weight: Tensor = layer.weight
    if isinstance(layer, TRANSPOSED):
        if layer.groups > 1:
            raise RuntimeError("a grouped transposed convolution")
        weight = select_indices(select_indices(weight, 1, rows), 0, columns)
    else:
        groups, height, width = layer.groups, layer.out_channels // layer.groups, layer.in_channels // layer.groups
        parts = []
        for number in range(groups):
            outputs = rows[rows // height == number]
            inputs = columns[columns // width == number] - number * width
            parts.append(weight[outputs][:, inputs])
        if len({part.shape for part in parts}) > 1:
            raise RuntimeError("a grouped convolution whose groups would differ")
        weight = nn.Parameter(torch.cat(parts).contiguous(), requires_grad=weight.requires_grad)
    layer.weight = weight
    if layer.bias is not None:
        layer.bias = select_indices(layer.bias, 0, rows)
    layer.out_channels, layer.in_channels = len(rows), len(columns)


def select_indices(tensor: Tensor, axis: int, indices: Tensor) -> Tensor:
    """Return these indices of a parameter or a buffer along an axis, as a parameter or a buffer."""
    some = tensor.detach().index_select(axis, indices.to(tensor.device)).contiguous()
    return nn.Parameter(some, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else some


@torch.no_grad()
def mask_channels(module: nn.Module, removal: Mapping[str, RemovedChannels]) -> None:
    """Zero the weights that compute these channels and those that read them, in place; all shapes stay."""
    for path, removed in removal.items():
        layer = get_layer(module, path)
        rows, columns = torch.tensor(sorted(removed.rows), dtype=torch.int64), sorted(removed.columns)
        if isinstance(layer, nn.Parameter):
            layer.index_fill_(channel_axis(layer), rows, 0)
            continue
        transposed = isinstance(layer, TRANSPOSED)
        for name in ("weight", "bias", "running_mean"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, Tensor) and not isinstance(layer, nn.PReLU):
                tensor.index_fill_(1 if transposed and name == "weight" else 0, rows, 0)
        for column in columns:
            mask_input_channel(layer, column)


def mask_input_channel(layer: nn.Module, column: int) -> None:
    """Zero the weights of a layer that read one input channel."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if isinstance(layer, CONVOLUTIONS) and layer.groups > 1:
        height, width = layer.out_channels // layer.groups, layer.in_channels // layer.groups
        number = column // width
        weight[number * height : (number + 1) * height, column % width] = 0
    elif isinstance(layer, TRANSPOSED):
        weight[column] = 0
    else:
        weight[:, column] = 0
