"""The layers of a model as an engine has to compute them: what a latency is made up of."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.transformer.anatomy import Anatomy, anatomy
from laconic.errors import SourceError
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import call
from laconic.timing.benchmark import LENGTH

Role = Literal["queries", "attended", "up", "down", "channels", "other"]
"""What a layer is in its model: makes queries, keys or values; takes what attention gives; makes feed-forward units;
takes them; works on channels (convolutions and what reads them); anything else."""


@dataclass(frozen=True)
class Cell:
    """A layer, and what goes into it for one sample; or the attention of a block, which has no weight.

    shape: of the input, [1, ...]. weight: [out, in / groups, kernel...]. groups: of attention, its heads. block: the
    block of a transformer that it is in. count: how many like it there are; a forecast may foresee a part of one.
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
        """What its time depends on, JSON-ready."""
        return {key: value for key, value in asdict(self).items() if key not in ("role", "block", "count")}

    @property
    def parameters(self) -> float:
        """Numbers in its weight, and in those of the others like it."""
        found = self.count if self.weight else 0.0
        for size in self.weight:
            found *= size
        return found

    def resized(self, inputs: int, outputs: int) -> "Cell":
        """With so many channels in and out, in all groups together; a depthwise convolution stays one."""
        depthwise = self.groups > 1
        groups = outputs if depthwise else 1
        shape = list(self.shape)
        shape[1 if self.kind == "conv" else -1] = outputs if depthwise else inputs
        weight = (outputs, 1 if depthwise else inputs, *self.weight[2:])
        return replace(self, shape=tuple(shape), weight=weight, groups=groups)

    def with_heads(self, keep: float) -> "Cell":
        """Attention with this share of its heads."""
        heads = max(round(self.groups * keep), 1)
        return replace(self, shape=(*self.shape[:-1], self.shape[-1] // self.groups * heads), groups=heads)

    @property
    def width(self) -> tuple[int, int]:
        """Channels in and out."""
        if self.kind == "attention":
            return self.shape[-1], self.shape[-1]
        return self.shape[1 if self.kind == "conv" else -1], self.weight[0]


def cells(checkpoint: Checkpoint) -> tuple[Cell, ...]:
    """The linear and convolutional layers of a checkpoint, and attention where its blocks are known, in the order in
    which they run, at the typical length."""
    module = checkpoint.module
    blocks = known_anatomy(module)
    known = dict(named(blocks)) if blocks else {}
    widths = {site.consumer: site.sources[1].width for site in blocks.of("heads")} if blocks else {}
    found: list[Cell] = []
    names = {layer: path for path, layer in module.named_modules()}

    def look(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        role, block = known.get(names[layer], ("other", None))
        if role == "attended":
            shape = tuple(args[0].shape)
            each = shape[-1] // widths[names[layer]]
            found.append(Cell("attention", shape, (), groups=each, block=block))
        found.append(cell(layer, tuple(args[0].shape), role, block))

    layers = [layer for layer in names if isinstance(layer, (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    handles = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        with torch.inference_mode():
            inputs = checkpoint.task.typical(1, LENGTH)
            call(module, {name: torch.tensor(array) for name, array in inputs.items()})
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found)


def cell(layer: nn.Module, shape: tuple[int, ...], role: Role, block: int | None) -> Cell:
    """A layer that is given an input of this shape."""
    if isinstance(layer, (nn.Linear, Conv1D)):
        weight = tuple(layer.weight.shape)
        return Cell("linear", shape, weight if isinstance(layer, nn.Linear) else weight[::-1], role=role, block=block)
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return Cell(
        "conv",
        shape,
        tuple(layer.weight.shape),
        stride=layer.stride,
        padding=padding(layer),
        dilation=layer.dilation,
        groups=layer.groups,
        role="channels" if role == "other" else role,
        block=block,
    )


def padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...]:
    """Of each axis, at both ends; that of `same` to the nearest."""
    if not isinstance(layer.padding, str):
        return tuple(layer.padding)
    same = layer.padding == "same"
    return tuple(d * (k - 1) // 2 if same else 0 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))


def known_anatomy(module: nn.Module) -> Anatomy | None:
    """The blocks of a transformer that is known; None for anything else."""
    try:
        return anatomy(module)
    except SourceError:
        return None


def named(found: Anatomy) -> Iterator[tuple[str, tuple[Role, int | None]]]:
    """The layers of each block with their roles."""
    for number, sites in enumerate(found.sites):
        for site, makes, takes in ((sites["heads"], "queries", "attended"), (sites["ffn"], "up", "down")):
            yield site.consumer, (takes, number)  # type: ignore[misc]
            yield from ((source.layer, (makes, number)) for source in site.sources)  # type: ignore[misc]
