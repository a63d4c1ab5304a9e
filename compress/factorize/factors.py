"""The two or three smaller layers (factors) that replace a layer, and the weight that they compose to.

All of them are linear, so that together they are one layer of the old one's shape, whose outputs can be compared with
the old one's by the moments of the inputs alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, einsum, nn
from torch.nn.utils import skip_init

from compress.statistics.layer_weights import weight_matrix

FactorizationKind = Literal["low-rank", "spatial", "separable", "grouped", "bottleneck"]

make_empty: Callable[..., nn.Module] = skip_init
"""Make a layer of this class with undefined weights, without drawing random numbers."""


class Factorization(BaseModel):
    """How a layer is factorized. size: rank, filters, groups or width, by kind.

    low-rank: a convolution of the same kernel, or a linear layer, to `size` channels, and a 1 x 1 convolution.
    spatial: a k x 1 convolution to `size` channels, and a 1 x k one. separable: `size` filters for each channel, and a
    1 x 1 convolution. grouped: the same kernel in `size` groups, and a 1 x 1 convolution. bottleneck: a 1 x 1
    convolution to `size` channels, the same kernel on these, and a 1 x 1 convolution.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FactorizationKind
    size: int


def make_factors(layer: nn.Module, factorization: Factorization) -> nn.Sequential:
    """Return the layers that replace this one, in its dtype, with undefined weights."""
    if not isinstance(layer, nn.Conv2d):
        out, into = weight_matrix(layer).shape
        like: dict[str, Any] = {"dtype": layer.weight.dtype}
        return nn.Sequential(
            make_empty(nn.Linear, into, factorization.size, bias=False, **like),
            make_empty(nn.Linear, factorization.size, out, bias=layer.bias is not None, **like),
        ).requires_grad_(False)
    return nn.Sequential(*make_convolutions(layer, factorization)).requires_grad_(False)


def make_convolutions(layer: nn.Conv2d, factorization: Factorization) -> list[Any]:
    """Return the layers that replace a convolution."""
    out, into, size = layer.out_channels, layer.in_channels, factorization.size
    whole: dict[str, Any] = {
        "kernel_size": layer.kernel_size,
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
    }
    last: dict[str, Any] = {"bias": layer.bias is not None}
    plans: list[tuple[int, int, dict[str, Any]]]
    match factorization.kind:
        case "low-rank":
            plans = [(into, size, whole), (size, out, last)]
        case "separable":
            plans = [(into, into * size, whole | {"groups": into}), (into * size, out, last)]
        case "grouped":
            plans = [(into, out, whole | {"groups": size}), (out, out, last)]
        case "bottleneck":
            plans = [(into, size, {}), (size, size, whole), (size, out, last)]
        case "spatial":
            plans = [(into, size, settings_along(layer, 0)), (size, out, settings_along(layer, 1) | last)]
    like = {"dtype": layer.weight.dtype}
    return [make_empty(nn.Conv2d, a, b, **({"kernel_size": 1, "bias": False} | kept | like)) for a, b, kept in plans]


def settings_along(layer: nn.Conv2d, axis: int) -> dict[str, Any]:
    """Return the settings of a convolution restricted to one axis."""

    def only(pair: Sequence[int], other: int) -> tuple[int, int]:
        return (pair[0], other) if axis == 0 else (other, pair[1])

    padding = layer.padding if isinstance(layer.padding, str) else only(layer.padding, 0)
    return {
        "kernel_size": only(layer.kernel_size, 1),
        "stride": only(layer.stride, 1),
        "dilation": only(layer.dilation, 1),
        "padding": padding,
    }


def compose_weight(weights: Sequence[Tensor], factorization: Factorization) -> Tensor:
    """Return the weight of the one layer that the factors compose to, [out, in x kernel], in the order of
    `flatten_inputs`."""
    first, last = weights[0], weights[-1]
    match factorization.kind:
        case "low-rank":
            return last.flatten(1) @ first.flatten(1)
        case "spatial":
            return einsum("orx,riy->oiyx", last[:, :, 0], first[..., 0]).flatten(1)
        case "separable":
            filters = first.reshape(-1, factorization.size, first[0].numel())
            return einsum("oim,imk->oik", last.reshape(len(last), -1, factorization.size), filters).flatten(1)
        case "grouped":
            blocks = first.reshape(factorization.size, -1, first[0].numel())
            return einsum("oga,gak->ogk", last.reshape(len(last), factorization.size, -1), blocks).flatten(1)
        case "bottleneck":
            return einsum("or,rsk,si->oik", last.flatten(1), weights[1].flatten(2), first.flatten(1)).flatten(1)


def count_multiplications(layer: nn.Module, factorization: Factorization | None = None) -> int:
    """Count the multiplications per output position of a layer, as it is or factorized."""
    if factorization is None or not isinstance(layer, nn.Conv2d):
        out, into = weight_matrix(layer).shape
        return out * into if factorization is None else factorization.size * (out + into)
    parts = make_convolutions(layer, factorization)
    # A first factor with a smaller stride than the whole computes more positions.
    steps = [int(torch.tensor(part.stride).prod()) for part in parts]
    uses, total = 1, 0
    for part, step in zip(reversed(parts), reversed(steps), strict=True):
        total += uses * part.weight.numel()
        uses *= step
    return total


def replace_layer(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Set the layer at a path."""
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, layer)
