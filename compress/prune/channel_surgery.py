"""Layers with channels taken out, and the same layers with those channels silent: the answers must be alike."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from compress.prune.coupling import CONVOLUTIONS, PER_CHANNEL, TRANSPOSED, Group, is_depthwise


@dataclass(frozen=True)
class Cut:
    """What goes of one layer. rows: channels that it makes, or all that it has where each has weights of its own.
    columns: channels that it takes."""

    rows: set[int] = field(default_factory=set)
    columns: set[int] = field(default_factory=set)


Cuts = dict[str, Cut]
"""By the layer's path."""


def cuts_of(chosen: Iterable[tuple[Group, Iterable[int]]]) -> Cuts:
    """What goes of each layer when these channels of these groups go."""
    cuts: Cuts = {}
    for group, channels in chosen:
        for member in group.members:
            cut = cuts.setdefault(member.path, Cut())
            side = cut.columns if member.axis == "in" else cut.rows
            side.update(place for channel in channels for place in member.places[channel])
    return cuts


def left(count: int, gone: Iterable[int]) -> Tensor:
    """The indices below `count` that stay, [n] int64."""
    stays = torch.ones(count, dtype=torch.bool)
    stays[sorted(gone)] = False
    return stays.nonzero().flatten()


def find(module: nn.Module, path: str) -> nn.Module | nn.Parameter:
    """The layer at a path, or the parameter."""
    owner, _, name = path.rpartition(".")
    found = getattr(module.get_submodule(owner), name) if name else module
    assert isinstance(found, (nn.Module, nn.Parameter))
    return found


def free_axis(parameter: Tensor) -> int:
    """The axis of a parameter that belongs to no layer on which its channels lie: the last that is longer than one."""
    return max((axis for axis, size in enumerate(parameter.shape) if size > 1), default=0)


def narrow(module: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Take these channels out of the layers, in place. Raises RuntimeError where a layer cannot be without them."""
    for path, cut in cuts.items():
        layer = find(module, path)
        if isinstance(layer, nn.Parameter):
            owner, _, name = path.rpartition(".")
            axis = free_axis(layer)
            setattr(module.get_submodule(owner), name, picked(layer, axis, left(layer.shape[axis], cut.rows)))
        elif isinstance(layer, PER_CHANNEL):
            narrow_each(layer, cut)
        elif is_depthwise(layer):
            narrow_each(layer, cut)
            layer.in_channels = layer.groups = layer.out_channels
        elif isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
            narrow_convolution(layer, cut)
        else:
            assert isinstance(layer, nn.Linear)
            rows, columns = left(layer.out_features, cut.rows), left(layer.in_features, cut.columns)
            layer.weight = picked(picked(layer.weight, 0, rows), 1, columns)
            if layer.bias is not None:
                layer.bias = picked(layer.bias, 0, rows)  # type: ignore[assignment]
            layer.out_features, layer.in_features = len(rows), len(columns)


def narrow_each(layer: nn.Module, cut: Cut) -> None:
    """A layer in which each channel has its own row of everything."""
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.ndim and len(tensor) > 1:  # neither a slope for all channels, nor a count of batches
            setattr(layer, name, picked(tensor, 0, left(len(tensor), cut.rows)))
    for name in ("num_features", "num_parameters", "out_channels"):
        if getattr(layer, name, 1) > 1:
            setattr(layer, name, getattr(layer, name) - len(cut.rows))


def narrow_convolution(layer: nn.Module, cut: Cut) -> None:
    """A convolution, transposed or not, in groups or not."""
    assert isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED))
    rows, columns = left(layer.out_channels, cut.rows), left(layer.in_channels, cut.columns)
    weight: Tensor = layer.weight
    if isinstance(layer, TRANSPOSED):
        if layer.groups > 1:
            raise RuntimeError("a transposed convolution in groups")
        weight = picked(picked(weight, 1, rows), 0, columns)
    else:
        groups, height, width = layer.groups, layer.out_channels // layer.groups, layer.in_channels // layer.groups
        parts = []
        for number in range(groups):
            own = rows[rows // height == number]
            taken = columns[columns // width == number] - number * width
            parts.append(weight[own][:, taken])
        if len({part.shape for part in parts}) > 1:
            raise RuntimeError("a grouped convolution whose groups would differ")
        weight = nn.Parameter(torch.cat(parts).contiguous(), requires_grad=weight.requires_grad)
    layer.weight = weight
    if layer.bias is not None:
        layer.bias = picked(layer.bias, 0, rows)
    layer.out_channels, layer.in_channels = len(rows), len(columns)


def picked(tensor: Tensor, axis: int, indices: Tensor) -> Tensor:
    """Some of a parameter's or a buffer's indices along an axis, as one of its kind."""
    some = tensor.detach().index_select(axis, indices.to(tensor.device)).contiguous()
    return nn.Parameter(some, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else some


@torch.no_grad()
def mask(module: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Silence these channels, in place: nobody makes them, nobody listens to them, all shapes stay."""
    for path, cut in cuts.items():
        layer = find(module, path)
        rows, columns = torch.tensor(sorted(cut.rows), dtype=torch.int64), sorted(cut.columns)
        if isinstance(layer, nn.Parameter):
            layer.index_fill_(free_axis(layer), rows, 0)
            continue
        transposed = isinstance(layer, TRANSPOSED)
        for name in ("weight", "bias", "running_mean"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, Tensor) and not isinstance(layer, nn.PReLU):
                tensor.index_fill_(1 if transposed and name == "weight" else 0, rows, 0)
        for column in columns:
            silence(layer, column)


def silence(layer: nn.Module, column: int) -> None:
    """Let a layer not listen to a channel that it takes."""
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
