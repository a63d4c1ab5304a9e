"""Reading the layer specs of a checkpoint."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.search.layer_spec import LayerSpec, Role
from compress.transformer.anatomy import Anatomy, UnitKind, anatomy
from laconic.errors import SourceError
from laconic.models.checkpoint import Checkpoint
from laconic.models.hooks import forward_hooks
from laconic.models.signature import call
from laconic.timing.benchmark import LENGTH

ROLES: dict[UnitKind, tuple[Role, Role]] = {"heads": ("qkv", "attention-output"), "ffn": ("up", "down")}
"""By the kind of a site, the roles of the layers that compute its units, and of the one that takes them."""


def read_layer_specs(checkpoint: Checkpoint) -> tuple[LayerSpec, ...]:
    """The linear and convolutional layers of a checkpoint, and attention where the architecture is known.

    In the order in which they run, at the task's typical length.
    """
    module = checkpoint.module
    blocks = find_anatomy(module)
    known = dict(find_roles(blocks)) if blocks else {}
    widths = {site.consumer: site.head for sites in blocks.sites for site in sites.values()} if blocks else {}
    found: list[LayerSpec] = []

    def record(path: str, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        role, block = known.get(path, ("other", None))
        if role == "attention-output":
            shape = tuple(args[0].shape)
            heads = shape[-1] // widths[path]
            found.append(LayerSpec("attention", shape, (), groups=heads, block=block))
        found.append(make_layer_spec(layer, tuple(args[0].shape), role, block))

    kinds = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    paths = {layer: path for path, layer in module.named_modules() if isinstance(layer, kinds)}
    with torch.inference_mode(), forward_hooks(module, paths.values(), before=record):
        inputs = checkpoint.task.typical(1, LENGTH)
        call(module, {name: torch.tensor(array) for name, array in inputs.items()})
    return tuple(found)


def make_layer_spec(layer: nn.Module, shape: tuple[int, ...], role: Role, block: int | None) -> LayerSpec:
    """The spec of a layer. shape: of its input."""
    if isinstance(layer, (nn.Linear, Conv1D)):
        weight = tuple(layer.weight.shape)
        return LayerSpec(
            "linear", shape, weight if isinstance(layer, nn.Linear) else weight[::-1], role=role, block=block
        )
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return LayerSpec(
        "conv",
        shape,
        tuple(layer.weight.shape),
        stride=layer.stride,
        padding=find_padding(layer),
        dilation=layer.dilation,
        groups=layer.groups,
        role="channels" if role == "other" else role,
        block=block,
    )


def find_padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...]:
    """Symmetric padding of each axis; `same` is approximated where it would be asymmetric."""
    if not isinstance(layer.padding, str):
        return tuple(layer.padding)
    same = layer.padding == "same"
    return tuple(d * (k - 1) // 2 if same else 0 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))


def find_anatomy(module: nn.Module) -> Anatomy | None:
    """The blocks of a transformer of a known architecture; None for any other module."""
    try:
        return anatomy(module)
    except SourceError:
        return None


def find_roles(found: Anatomy) -> Iterator[tuple[str, tuple[Role, int | None]]]:
    """The path of each layer of the blocks, with its role and the index of its block."""
    for number, sites in enumerate(found.sites):
        for kind, site in sites.items():
            producer, consumer = ROLES[kind]
            yield site.consumer, (consumer, number)
            yield from ((source.layer, (producer, number)) for source in site.sources)
