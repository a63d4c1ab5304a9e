"""The sizes of a module's layers: what a structural cut changed, and the same change on an empty module.

The indices that were removed do not matter to an empty module, since its weights are filled in afterwards.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

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
