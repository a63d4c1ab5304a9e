"""Cutting units and blocks out of a transformer: weights, counts and config, and the same on an empty module."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.statistics.gram import matrix
from compress.transformer.anatomy import Site, anatomy, configs
from compress.transformer.shapes import changes, resize, sizes


def columns(site: Site, kept: Sequence[int]) -> Tensor:
    """The consumer's columns that belong to these units, in their order; [units x width] int64."""
    return rows(kept, site.width, 0)


def rows(units: Sequence[int], width: int, start: int) -> Tensor:
    """The indices of units that lie `width` apart from `start` on."""
    first = torch.tensor(list(units), dtype=torch.int64)[:, None] * width + start
    return (first + torch.arange(width)).flatten()


def cut(module: nn.Module, site: Site, kept: Sequence[int]) -> None:
    """Leave these units of a site, in place. The config is left to `agree`."""
    for layer in dict.fromkeys(source.layer for source in site.sources):
        own = [source for source in site.sources if source.layer == layer]
        select(module.get_submodule(layer), out=torch.cat([rows(kept, each.width, each.start) for each in own]))
    select(module.get_submodule(site.consumer), into=columns(site, kept))
    for name, count in site.counts.items():
        assign(module, name, count * len(kept))


def select(layer: nn.Module, *, out: Tensor | None = None, into: Tensor | None = None) -> None:
    """Leave some outputs, or some inputs, of a linear layer, in place."""
    turned = isinstance(layer, Conv1D)
    own: Any = layer
    weight, bias = own.weight, own.bias
    kept = matrix(layer).detach()
    if out is not None:
        kept = kept[out]
        if bias is not None:
            own.bias = parameter(bias.detach()[out], bias)
    if into is not None:
        kept = kept[:, into]
    own.weight = parameter(kept.T if turned else kept, weight)
    names = ("nf", "nx") if turned else ("out_features", "in_features")
    for name, count in zip(names, kept.shape, strict=True):
        setattr(layer, name, count)


def parameter(value: Tensor, like: nn.Parameter) -> nn.Parameter:
    """A weight of its own, that learns where the other one does."""
    return nn.Parameter(value.contiguous().clone(), requires_grad=like.requires_grad)


def keep_blocks(module: nn.Module, kept: Sequence[int]) -> None:
    """Leave these blocks, in their order, in place; what counts blocks counts anew."""
    found = anatomy(module)
    path, _, name = found.stack.rpartition(".")
    owner: Any = module.get_submodule(path)
    blocks = getattr(owner, name)
    setattr(owner, name, nn.ModuleList([blocks[index] for index in kept]))
    for number, block in enumerate(getattr(owner, name)):
        for each in block.modules():
            if hasattr(each, "layer_idx"):
                each.layer_idx = number
    if hasattr(owner, "n_layers"):
        owner.n_layers = len(kept)
    for _, config in configs(module):
        kinds = getattr(config, "layer_types", None)
        if kinds is not None and len(kinds) == len(blocks):
            config.layer_types = [kinds[index] for index in kept]
        config.num_hidden_layers = len(kept)


def agree(module: nn.Module) -> None:
    """Write into the config what all blocks agree on, where the config can say it."""
    found = anatomy(module)
    widths = {site.units for site in found.of("ffn")}
    heads = {(site.units, site.width) for site in found.of("heads")}
    for _, config in configs(module):
        if len(widths) == 1 and hasattr(config, found.family.config_width):
            setattr(config, found.family.config_width, next(iter(widths)))
        # Without a head's width of its own, a config takes it for the hidden size divided by the heads.
        if len(heads) == 1 and getattr(config, "head_dim", None):
            units, width = next(iter(heads))
            config.num_attention_heads = units * (width // config.head_dim)
            if hasattr(config, "num_key_value_heads"):
                config.num_key_value_heads = units


def structure(before: Mapping[str, Any], module: nn.Module, sites: Iterable[Site]) -> dict[str, Any]:
    """What `replay` needs: the sizes that changed since `before` (as `sizes` has them), and the counts of these sites,
    as they are now."""
    counts = {name: read(module, name) for site in sites for name in site.counts}
    return {"sizes": changes(before, sizes(module)), "counts": counts}


def replay(module: nn.Module, made: Mapping[str, Any]) -> None:
    """Give an empty module the structure that `structure` found."""
    resize(module, made["sizes"])
    for name, value in made["counts"].items():
        assign(module, name, value)
    agree(module)


def read(module: nn.Module, name: str) -> Any:
    """A module's attribute, by its path."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def assign(module: nn.Module, name: str, value: Any) -> None:
    """Set a module's attribute, by its path."""
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, value)
