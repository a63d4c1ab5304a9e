"""What a layer is replaced with: two or three smaller ones, one behind the other; and the weight that these make.

All of them are linear, so that together they are one layer of the old one's shape, whose answers can be held against
the old one's by the moments of what flows in.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, einsum, nn
from torch.nn.utils import skip_init
from transformers.pytorch_utils import Conv1D

Kind = Literal["low-rank", "spatial", "separable", "grouped", "bottleneck"]

empty: Callable[..., nn.Module] = skip_init
"""A layer of this class whose weights are undefined, and for which nothing was drawn at random."""


class Shape(BaseModel):
    """How a layer is taken apart. size: what is in between.

    low-rank: a convolution of the same kernel, or a linear layer, to `size` channels, and a 1 x 1 convolution.
    spatial: a k x 1 convolution to `size` channels, and a 1 x k one. separable: `size` filters for each channel, and a
    1 x 1 convolution. grouped: the same kernel in `size` groups, and a 1 x 1 convolution. bottleneck: a 1 x 1
    convolution to `size` channels, the same kernel on these, and a 1 x 1 convolution.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    size: int


def split(layer: nn.Module, shape: Shape) -> nn.Sequential:
    """Layers to put in this one's place, their weights undefined, in its dtype."""
    if not isinstance(layer, nn.Conv2d):
        out, into = features(layer)
        like: dict[str, Any] = {"dtype": layer.weight.dtype}
        return nn.Sequential(
            empty(nn.Linear, into, shape.size, bias=False, **like),
            empty(nn.Linear, shape.size, out, bias=layer.bias is not None, **like),
        ).requires_grad_(False)
    return nn.Sequential(*convolutions(layer, shape)).requires_grad_(False)


def convolutions(layer: nn.Conv2d, shape: Shape) -> list[Any]:
    """The layers to put in a convolution's place."""
    out, into, size = layer.out_channels, layer.in_channels, shape.size
    whole: dict[str, Any] = {
        "kernel_size": layer.kernel_size,
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
    }
    last: dict[str, Any] = {"bias": layer.bias is not None}
    plans: list[tuple[int, int, dict[str, Any]]]
    match shape.kind:
        case "low-rank":
            plans = [(into, size, whole), (size, out, last)]
        case "separable":
            plans = [(into, into * size, whole | {"groups": into}), (into * size, out, last)]
        case "grouped":
            plans = [(into, out, whole | {"groups": size}), (out, out, last)]
        case "bottleneck":
            plans = [(into, size, {}), (size, size, whole), (size, out, last)]
        case "spatial":
            plans = [(into, size, along(layer, 0)), (size, out, along(layer, 1) | last)]
    like = {"dtype": layer.weight.dtype}
    return [empty(nn.Conv2d, a, b, **({"kernel_size": 1, "bias": False} | kept | like)) for a, b, kept in plans]


def along(layer: nn.Conv2d, axis: int) -> dict[str, Any]:
    """What of a convolution goes along one axis."""

    def only(pair: Sequence[int], other: int) -> tuple[int, int]:
        return (pair[0], other) if axis == 0 else (other, pair[1])

    padding = layer.padding if isinstance(layer.padding, str) else only(layer.padding, 0)
    return {
        "kernel_size": only(layer.kernel_size, 1),
        "stride": only(layer.stride, 1),
        "dilation": only(layer.dilation, 1),
        "padding": padding,
    }


def together(weights: Sequence[Tensor], shape: Shape) -> Tensor:
    """The weight of the one layer that the parts make, [out, in x kernel], in the order of `gram.as_rows`."""
    first, last = weights[0], weights[-1]
    match shape.kind:
        case "low-rank":
            return last.flatten(1) @ first.flatten(1)
        case "spatial":
            return einsum("orx,riy->oiyx", last[:, :, 0], first[..., 0]).flatten(1)
        case "separable":
            filters = first.reshape(-1, shape.size, first[0].numel())
            return einsum("oim,imk->oik", last.reshape(len(last), -1, shape.size), filters).flatten(1)
        case "grouped":
            blocks = first.reshape(shape.size, -1, first[0].numel())
            return einsum("oga,gak->ogk", last.reshape(len(last), shape.size, -1), blocks).flatten(1)
        case "bottleneck":
            return einsum("or,rsk,si->oik", last.flatten(1), weights[1].flatten(2), first.flatten(1)).flatten(1)


def work(layer: nn.Module, shape: Shape | None = None) -> int:
    """Multiplications for each of the layer's outputs' places, as it is or taken apart."""
    if shape is None or not isinstance(layer, nn.Conv2d):
        out, into = features(layer)
        return out * into if shape is None else shape.size * (out + into)
    parts = convolutions(layer, shape)
    # A first part that takes a smaller step than the whole is used more often.
    steps = [int(torch.tensor(part.stride).prod()) for part in parts]
    uses, total = 1, 0
    for part, step in zip(reversed(parts), reversed(steps), strict=True):
        total += uses * part.weight.numel()
        uses *= step
    return total


def features(layer: nn.Module) -> tuple[int, int]:
    """How many values a layer makes, and of how many each: those of a patch, for a convolution."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if isinstance(layer, Conv1D):
        return weight.shape[1], weight.shape[0]
    return weight.shape[0], weight[0].numel()


def put(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Set the layer at a path."""
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, layer)
