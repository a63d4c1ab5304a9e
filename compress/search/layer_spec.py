"""Layer specs: the shapes of a model's layers, on which their latency depends, and how a checkpoint's are read."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from laconic.errors import SourceError
from laconic.models.anatomy import Anatomy, UnitKind, anatomy
from laconic.models.checkpoint import Checkpoint
from laconic.models.hooks import forward_hooks
from laconic.models.signature import call
from laconic.timing.benchmark import LENGTH

Role = Literal["qkv", "attention-output", "up", "down", "channels", "other"]
"""The role of a layer in its model: query, key or value projection; output projection of attention; up- or
down-projection of the feed-forward network; a convolution, or a layer that reads one; any other."""

ROLES: dict[UnitKind, tuple[Role, Role]] = {"heads": ("qkv", "attention-output"), "ffn": ("up", "down")}
"""By the kind of a site, the roles of the layers that compute its units, and of the one that takes them."""


@dataclass(frozen=True)
class LayerSpec:
    """The shapes of a layer, or of the attention of a block, which has no weight.

    shape: of the input for one sample, [1, ...]. weight: its shape, [out, in / groups, kernel...]. groups: of a
    convolution; the heads of attention. role: in the model. block: index of the transformer block that it is in. count:
    how many such layers there are; a fraction in a prediction.
    """

    kind: Literal["linear", "conv", "attention"]
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    role: Role = "other"
    block: int | None = None
    count: float = 1.0

    @property
    def signature(self) -> dict[str, Any]:
        """The fields that its latency depends on, JSON-ready."""
        return {key: value for key, value in asdict(self).items() if key not in ("role", "block", "count")}

    @property
    def parameters(self) -> float:
        """Numbers in the weights of all `count` layers."""
        return self.count * math.prod(self.weight) if self.weight else 0.0

    @property
    def width(self) -> tuple[int, int]:
        """Input and output channels."""
        if self.kind == "attention":
            return self.shape[-1], self.shape[-1]
        return self.shape[1 if self.kind == "conv" else -1], self.weight[0]

    def resize(self, inputs: int, outputs: int) -> "LayerSpec":
        """Return the layer with other numbers of channels; a depthwise convolution stays depthwise."""
        depthwise = self.groups > 1
        groups = outputs if depthwise else 1
        shape = list(self.shape)
        shape[1 if self.kind == "conv" else -1] = outputs if depthwise else inputs
        weight = (outputs, 1 if depthwise else inputs, *self.weight[2:])
        return replace(self, shape=tuple(shape), weight=weight, groups=groups)

    def keep_heads(self, keep: float) -> "LayerSpec":
        """Return attention with a share of its heads."""
        heads = max(round(self.groups * keep), 1)
        return replace(self, shape=(*self.shape[:-1], self.shape[-1] // self.groups * heads), groups=heads)


def read_layer_specs(checkpoint: Checkpoint) -> tuple[LayerSpec, ...]:
    """Read the linear and convolutional layers of a checkpoint, and attention where the architecture is known.

    In the order in which they run, at the task's typical length.
    """
    module = checkpoint.module
    blocks = find_anatomy(module)
    roles = dict(find_roles(blocks)) if blocks else {}
    widths = {site.consumer: site.head for sites in blocks.sites for site in sites.values()} if blocks else {}
    specs: list[LayerSpec] = []

    def record(path: str, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        role, block = roles.get(path, ("other", None))
        shape = tuple(args[0].shape)
        if role == "attention-output":
            specs.append(LayerSpec("attention", shape, (), groups=shape[-1] // widths[path], block=block))
        specs.append(make_layer_spec(layer, shape, role, block))

    kinds = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    paths = {layer: path for path, layer in module.named_modules() if isinstance(layer, kinds)}
    with torch.inference_mode(), forward_hooks(module, paths.values(), before=record):
        inputs = checkpoint.task.typical(1, LENGTH)
        call(module, {name: torch.tensor(array) for name, array in inputs.items()})
    return tuple(specs)


def make_layer_spec(layer: nn.Module, shape: tuple[int, ...], role: Role, block: int | None) -> LayerSpec:
    """Make the spec of a layer. shape: of its input."""
    if isinstance(layer, (nn.Linear, Conv1D)):
        weight = tuple(layer.weight.shape)
        weight = weight if isinstance(layer, nn.Linear) else weight[::-1]
        return LayerSpec("linear", shape, weight, role=role, block=block)
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
    """Return the symmetric padding of each axis; `same` is approximated where it would be asymmetric."""
    if not isinstance(layer.padding, str):
        return tuple(layer.padding)
    same = layer.padding == "same"
    return tuple(d * (k - 1) // 2 if same else 0 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))


def find_anatomy(module: nn.Module) -> Anatomy | None:
    """Find the blocks of a transformer of a known architecture; None for any other module."""
    try:
        return anatomy(module)
    except SourceError:
        return None


def find_roles(blocks: Anatomy) -> Iterator[tuple[str, tuple[Role, int | None]]]:
    """Yield the path of each layer of the blocks, with its role and the index of its block."""
    for number, sites in enumerate(blocks.sites):
        for kind, site in sites.items():
            producer, consumer = ROLES[kind]
            yield site.consumer, (consumer, number)
            yield from ((source.layer, (producer, number)) for source in site.sources)
