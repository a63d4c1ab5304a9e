"""The layers of a transformer block by their roles, which are found from the shapes of its weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from torch import nn
from transformers.pytorch_utils import Conv1D

HEAD_WIDTHS = ("attention_head_size", "head_dim", "head_size", "key_value_proj_dim")
"""Attributes of an attention module that hold the width of one head."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
INTERLEAVED = ("query_key_value",)
"""Names of fused layers whose rows are ordered by head, with query, key and value within each (GPT-NeoX, Bloom)."""

Sizes = dict[str, tuple[int, ...]]
"""By path, the outputs and inputs of each linear layer of a block, in order."""


@dataclass(frozen=True)
class BlockShape:
    """The layers of a block; paths are relative to it.

    attention: the submodule that holds the numbers of heads. head_width: features of one head. query, key, value: the
    layers of these, the same one three times where they are fused. projections: all layers whose outputs are split into
    heads. out: the layer that takes the heads. heads: how many; none of these where the attention has another form, or
    there is none. keys: key-value heads. up, down: the layers of the feed-forward network, whose units are the outputs
    of `up`; none where it has another form. between: depthwise convolutions over the units. gated_in_one: whether one
    layer computes units and gates, one after the other.
    """

    attention: str = ""
    head_width: int = 1
    query: str = ""
    key: str = ""
    value: str = ""
    projections: tuple[str, ...] = ()
    out: str = ""
    heads: int = 0
    keys: int = 0
    up: tuple[str, ...] = ()
    down: str | None = None
    between: tuple[str, ...] = ()
    gated_in_one: bool = False

    @property
    def fused(self) -> bool:
        """Whether queries, keys and values are the outputs of one layer."""
        return len(self.projections) == 1

    @property
    def interleaved(self) -> bool:
        """Whether the rows of a fused layer are ordered by head."""
        return self.fused and self.query.endswith(INTERLEAVED)


def find_shape(block: nn.Module) -> BlockShape | None:
    """Return the roles of a block's layers; None for a module with neither one attention nor a feed-forward network."""
    layers = {path: layer for path, layer in block.named_modules() if path and is_linear(layer)}
    sizes: Sizes = {path: linear_shape(layer) for path, layer in layers.items()}
    attention = find_attention(block, list(sizes))
    known = find_heads(block, attention, sizes) if attention else None
    roles = known or BlockShape()
    taken = (*roles.projections, roles.out) if known else [path for path in sizes if path.startswith(f"{attention}.")]
    up, down, gated = find_feed_forward([path for path in sizes if path not in taken], sizes)
    if not known and not down:
        return None
    between = tuple(find_depthwise(block, sizes[down][1])) if down else ()
    return replace(roles, up=up, down=down, gated_in_one=gated, between=between)


def find_heads(block: nn.Module, attention: str, sizes: Sizes) -> BlockShape | None:
    """Return the roles of the layers of an attention; None where its heads are of another form.

    The layer that takes the heads is defined as the last or the first one in the attention, or right behind it. What
    the shapes leave open the proof of a cut decides.
    """
    order = list(sizes)
    width = read_head_width(block.get_submodule(attention)) or 1
    inside = [path for path in order if path.startswith(f"{attention}.")]
    # Queries, keys and values, in one layer or in three, or BERT's attention.self: the layer that takes the heads is
    # defined behind them.
    around = f"{attention.rpartition('.')[0]}."
    behind = [
        path
        for path in order[order.index(inside[-1]) + 1 :][:1]
        if len(inside) in (1, 3) or (len(around) > 1 and path.startswith(around))
    ]
    for out in behind or [inside[-1], inside[0]]:
        projections = [path for path in inside if path != out]
        hidden, features = sizes[out]
        keys = count_keys([sizes[path] for path in projections], hidden, features, width)
        if keys:
            named = name_roles(projections, [sizes[path][0] for path in projections])
            return BlockShape(attention, width, *named, tuple(projections), out, features // width, keys)
    return None


def is_linear(layer: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is a linear layer."""
    return isinstance(layer, (nn.Linear, Conv1D))


def linear_shape(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a linear layer."""
    rows, columns = layer.weight.shape
    return (columns, rows) if isinstance(layer, Conv1D) else (rows, columns)


def read_head_width(part: nn.Module) -> int | None:
    """Return the width of one head, where a module says it."""
    widths = (getattr(part, name, None) for name in HEAD_WIDTHS)
    return next((width for width in widths if isinstance(width, int) and width > 0), None)


def find_attention(block: nn.Module, layers: Sequence[str]) -> str | None:
    """Return the path of the one submodule with heads and linear layers in it; None where there is none, or several."""
    attentions = [
        path
        for path, part in block.named_modules()
        if path and read_head_width(part) and any(layer.startswith(f"{path}.") for layer in layers)
    ]
    inner = [path for path in attentions if not any(other.startswith(f"{path}.") for other in attentions)]
    return inner[0] if len(inner) == 1 else None


def count_keys(sizes: Sequence[tuple[int, ...]], hidden: int, features: int, width: int) -> int:
    """Return the number of key-value heads; 0 where the shapes are not those of an attention. sizes: of the
    projections, outputs and inputs."""
    if features % width or any(inputs != hidden for _, inputs in sizes):
        return 0
    heads = features // width
    if len(sizes) == 1:
        rest = sizes[0][0] - features
        keys, left = divmod(rest, 2 * width)
        return keys if keys > 0 and not left and heads % keys == 0 else 0
    rows = {outputs for outputs, _ in sizes}
    keys = min(rows) // width
    fits = rows <= {features, keys * width} and features in rows and keys > 0 and heads % keys == 0
    return keys if len(sizes) >= 3 and fits else 0


def name_roles(projections: Sequence[str], rows: Sequence[int]) -> tuple[str, str, str]:
    """Return which of the projections are queries, keys and values: by their initials, or else in this order."""
    if len(projections) == 1:
        return (projections[0],) * 3
    initials = {path.rpartition(".")[2][0].lower(): path for path in reversed(projections)}
    if all(initial in initials for initial in "qkv"):
        return initials["q"], initials["k"], initials["v"]
    largest = max(range(len(rows)), key=lambda index: rows[index])
    others = [path for index, path in enumerate(projections) if index != largest]
    return projections[largest], others[0], others[1]


def find_feed_forward(paths: Sequence[str], sizes: Sizes) -> tuple[tuple[str, ...], str | None, bool]:
    """Return the layers before and after the feed-forward units, and whether one layer computes units and gates.

    paths: the block's other linear layers, in order. The last pair is taken: of a mixture of experts a shared one.
    Layers that are all square are none of it, as those of an attention that is not known.
    """
    for position in range(len(paths) - 1, 0, -1):
        hidden, units = sizes[paths[position]]
        if hidden == units and len(paths) > 3:
            continue
        before = paths[max(position - 2, 0) : position]
        up = tuple(path for path in before if sizes[path] == (units, hidden))
        if sizes[before[-1]] == (2 * units, hidden):
            return (before[-1],), paths[position], True
        if up and up[-1] == before[-1]:
            return up, paths[position], False
    return (), None, False


def find_depthwise(block: nn.Module, units: int) -> Iterator[str]:
    """Yield the depthwise convolutions of a block with a channel for each feed-forward unit."""
    for path, layer in block.named_modules():
        if isinstance(layer, CONVOLUTIONS) and layer.groups == layer.in_channels == layer.out_channels == units > 1:
            yield path


def find_tables(block: nn.Module, shape: BlockShape) -> Iterator[tuple[str, int]]:
    """Yield the parameters of a block with a row, a column or, in the attention itself, a number for each head, as
    relative position biases and attention sinks, by path and axis."""
    for path, parameter in block.named_parameters():
        if path.rpartition(".")[0] == shape.attention and parameter.shape == (shape.heads,):
            yield path, 0
        owner = block.get_submodule(path.rpartition(".")[0])
        axes = [axis for axis, size in enumerate(parameter.shape) if size == shape.heads]
        if parameter.ndim > 1 and len(axes) == 1 and not isinstance(owner, (nn.Linear, Conv1D, *CONVOLUTIONS)):
            yield path, axes[0]
