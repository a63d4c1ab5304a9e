"""Removing units and blocks from a transformer: weights, counts and config; and the same sizes for an empty module.

The indices that were removed do not matter to an empty module, since its weights are filled in afterwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.statistics.layer_weights import weight_matrix
from laconic.errors import SourceError
from laconic.models.anatomy import Site, anatomy, iterate_configs

WIDTH_KEYS = ("intermediate_size", "ffn_dim", "hidden_dim", "n_inner")
"""Keys of a model's config for the width of the FFN."""
BLOCKS = "blocks"
"""The key of a record's structure with the indices of the blocks that stayed."""

COUNTS = (
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "groups",
    "num_features",
    "num_embeddings",
    "embedding_dim",
    "normalized_shape",
    "nf",
    "nx",
)
"""Attributes in which layers repeat the shapes of their weights."""


def consumer_columns(site: Site, kept: Sequence[int]) -> Tensor:
    """Return the columns of the consumer that belong to these units, in order; [units x width] int64."""
    return unit_indices(torch.tensor(list(kept), dtype=torch.int64), site.width)


def unit_indices(units: Tensor, width: int, start: int = 0) -> Tensor:
    """Return the rows or columns of units that are `width` wide each, beginning at `start`; [units x width] int64."""
    return (units[:, None] * width + start + torch.arange(width)).flatten()


def keep_units(module: nn.Module, site: Site, kept: Sequence[int]) -> None:
    """Remove all other units of a site, in place. The config is left to `update_config`."""
    units = torch.tensor(list(kept), dtype=torch.int64)
    for layer in dict.fromkeys(source.layer for source in site.sources):
        sources = [source for source in site.sources if source.layer == layer]
        rows = torch.cat([unit_indices(units, source.width, source.start) for source in sources])
        select_features(module.get_submodule(layer), out=rows)
    select_features(module.get_submodule(site.consumer), into=consumer_columns(site, kept))
    for name, axis in site.tables:
        table = get_attribute(module, name)
        entries = unit_indices(units, table.shape[axis] // site.units)
        set_attribute(module, name, make_parameter(table.detach().index_select(axis, entries), table))
        owner = module.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Embedding):
            owner.num_embeddings, owner.embedding_dim = owner.weight.shape
    for name, count in site.counts.items():
        set_attribute(module, name, count * len(kept))


def select_features(layer: nn.Module, *, out: Tensor | None = None, into: Tensor | None = None) -> None:
    """Keep these output features, or these input features, of a linear layer, in place."""
    transposed = isinstance(layer, Conv1D)
    linear: Any = layer
    weight, bias = linear.weight, linear.bias
    kept = weight_matrix(layer).detach()
    if out is not None:
        kept = kept[out]
        if bias is not None:
            linear.bias = make_parameter(bias.detach()[out], bias)
    if into is not None:
        kept = kept[:, into]
    linear.weight = make_parameter(kept.T if transposed else kept, weight)
    names = ("nf", "nx") if transposed else ("out_features", "in_features")
    for name, count in zip(names, kept.shape, strict=True):
        setattr(layer, name, count)


def make_parameter(value: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter with a copy of the value, trainable if the other one is."""
    return nn.Parameter(value.contiguous().clone(), requires_grad=like.requires_grad)


def keep_blocks(module: nn.Module, kept: Sequence[int]) -> None:
    """Remove all other blocks, in place, and update the attributes and configs that count them."""
    known = anatomy(module)
    path, _, name = known.stack.rpartition(".")
    owner: Any = module.get_submodule(path)
    blocks = getattr(owner, name)
    if len(blocks) != len(known.blocks):
        raise SourceError(
            f"{known.stack} holds {len(blocks) - len(known.blocks)} modules that are no blocks, so that blocks cannot "
            f"be removed from it. Use prune.ffn or prune.heads"
        )
    left = [blocks[index] for index in kept]
    setattr(owner, name, nn.Sequential(*left) if isinstance(blocks, nn.Sequential) else nn.ModuleList(left))
    for number, block in enumerate(getattr(owner, name)):
        for part in block.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number
    if hasattr(owner, "n_layers"):
        owner.n_layers = len(kept)
    for _, config in iterate_configs(module):
        kinds = getattr(config, "layer_types", None)
        if kinds is not None and len(kinds) == len(blocks):
            config.layer_types = [kinds[index] for index in kept]
        config.num_hidden_layers = len(kept)


def update_config(module: nn.Module) -> None:
    """Write FFN width and number of heads into the configs, where all blocks agree and the config has a key for
    them."""
    blocks = anatomy(module)
    widths = {sites["ffn"].units for sites in blocks.sites if "ffn" in sites}
    heads = {
        (sites["heads"].units * sites["heads"].width, sites["heads"].keys or sites["heads"].units)
        for sites in blocks.sites
        if "heads" in sites
    }
    for _, config in iterate_configs(module):
        for name in WIDTH_KEYS if len(widths) == 1 else ():
            if hasattr(config, name):
                setattr(config, name, next(iter(widths)))
        # A config without a head width of its own derives it as hidden size divided by heads.
        if len(heads) == 1 and getattr(config, "head_dim", None):
            features, keys = next(iter(heads))
            config.num_attention_heads = features // config.head_dim
            if hasattr(config, "num_key_value_heads"):
                config.num_key_value_heads = keys


def describe_structure(before: Mapping[str, Any], module: nn.Module, sites: Iterable[Site]) -> dict[str, Any]:
    """Return what `replay_structure` needs: the sizes that changed since `before` (from `read_sizes`), and the present
    values of the attributes that count the units of these sites."""
    counts = {name: get_attribute(module, name) for site in sites for name in site.counts}
    return {"sizes": diff_sizes(before, read_sizes(module)), "counts": counts}


def replay_structure(module: nn.Module, structure: Mapping[str, Any]) -> None:
    """Give an empty module the structure that `describe_structure` described."""
    resize_layers(module, structure["sizes"])
    for name, value in structure["counts"].items():
        set_attribute(module, name, value)
    update_config(module)


def get_attribute(module: nn.Module, name: str) -> Any:
    """Return a submodule's attribute, by its dotted path."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set a submodule's attribute, by its dotted path."""
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, value)


def read_sizes(module: nn.Module) -> dict[str, Any]:
    """Return the shape of every weight and buffer, and every attribute that repeats one, by path. JSON-ready."""
    tensors = {name: list(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}
    counts = {
        f"{path}.{name}": list(value) if isinstance(value, tuple) else value
        for path, layer in module.named_modules()
        if is_layer(layer)
        for name in COUNTS
        if (value := getattr(layer, name, None)) is not None
    }
    return {"tensors": tensors, "counts": counts}


def is_layer(layer: nn.Module) -> bool:
    """Whether a module is a layer of torch.nn, or of a class that derives from one, without submodules."""
    bases = (base for base in type(layer).__mro__ if base is not nn.Module)
    known = isinstance(layer, Conv1D) or any(base.__module__.startswith("torch.nn.") for base in bases)
    return known and not list(layer.children())


def diff_sizes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `read_sizes` that are in both and differ, with their values afterwards."""
    return {
        kind: {name: value for name, value in after[kind].items() if before[kind].get(name, value) != value}
        for kind in before
    }


def resize_layers(module: nn.Module, changed: Mapping[str, Any]) -> None:
    """Give the layers of a module the sizes that `diff_sizes` found; the values of resized weights are undefined.

    Tied weights stay tied. Raises KeyError for a path that the module does not have.
    """
    replaced: dict[int, nn.Parameter] = {}
    for name, shape in changed["tensors"].items():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        old = getattr(owner, last)
        if not isinstance(old, nn.Parameter):
            setattr(owner, last, torch.empty(shape, dtype=old.dtype))
            continue
        if id(old) not in replaced:
            replaced[id(old)] = nn.Parameter(torch.empty(shape, dtype=old.dtype), requires_grad=old.requires_grad)
        setattr(owner, last, replaced[id(old)])
    for name, value in changed["counts"].items():
        path, _, last = name.rpartition(".")
        setattr(module.get_submodule(path), last, tuple(value) if isinstance(value, list) else value)
