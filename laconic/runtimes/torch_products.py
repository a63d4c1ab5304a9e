"""What multiplies and adds, and pools, in the engine `torch`."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

CONVOLUTIONS = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
TRANSPOSED = {3: functional.conv_transpose1d, 4: functional.conv_transpose2d, 5: functional.conv_transpose3d}
"""By the number of axes of their input."""


def multiply(left: Tensor, right: Tensor, *, dtype: torch.dtype | None) -> Tensor:
    """A product of two activations, computed in a type; in their own where it is None."""
    return left @ right if dtype is None else left.to(dtype) @ right.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer, computed in the type of its weight [out, in]."""
    return functional.linear(x.to(weight.dtype), weight, bias)


def split_pads(pads: Sequence[int], axes: int) -> tuple[list[int], list[int]]:
    """The padding that both ends of each axis have, and what is left for `functional.pad`."""
    before, after = list(pads[:axes]), list(pads[axes:])
    common = [min(a, b) for a, b in zip(before, after, strict=True)]
    rest = [
        size for a, b, both in reversed(list(zip(before, after, common, strict=True))) for size in (a - both, b - both)
    ]
    return common, rest


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pads: tuple[int, ...], strides: tuple[int, ...],
    dilations: tuple[int, ...], group: int,
) -> Tensor:  # fmt: skip
    """A convolution, computed in the type of its weight [out, in / group, ...]."""
    common, rest = split_pads(pads, x.ndim - 2)
    x = functional.pad(x, rest) if any(rest) else x
    return CONVOLUTIONS[x.ndim](x.to(weight.dtype), weight, bias, strides, common, dilations, group)


def transposed_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pads: tuple[int, ...], strides: tuple[int, ...],
    dilations: tuple[int, ...], group: int, output_padding: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """A transposed convolution, computed in the type of its weight."""
    common, rest = split_pads(pads, x.ndim - 2)
    if any(rest):
        raise NotImplementedError("ConvTranspose with other padding at one end than at the other")
    run = TRANSPOSED[x.ndim]
    found: Tensor = run(x.to(weight.dtype), weight, bias, strides, common, output_padding, group, dilations)
    return found


def pool_largest(
    x: Tensor, *, kernel_shape: tuple[int, ...], pads: tuple[int, ...], strides: tuple[int, ...],
    dilations: tuple[int, ...], ceil_mode: int,
) -> Tensor:  # fmt: skip
    """The largest element of each window."""
    common, rest = split_pads(pads, x.ndim - 2)
    x = functional.pad(x, rest, value=-torch.inf) if any(rest) else x
    run = {3: functional.max_pool1d, 4: functional.max_pool2d, 5: functional.max_pool3d}[x.ndim]
    found: Tensor = run(x, kernel_shape, strides, common, dilations, bool(ceil_mode))
    return found


def pool_mean(
    x: Tensor, *, kernel_shape: tuple[int, ...], pads: tuple[int, ...], strides: tuple[int, ...], ceil_mode: int,
    count_include_pad: int,
) -> Tensor:  # fmt: skip
    """The mean of each window."""
    common, rest = split_pads(pads, x.ndim - 2)
    if any(rest):
        raise NotImplementedError("AveragePool with other padding at one end than at the other")
    run = {3: functional.avg_pool1d, 4: functional.avg_pool2d, 5: functional.avg_pool3d}[x.ndim]
    found: Tensor = run(x, kernel_shape, strides, common, bool(ceil_mode), bool(count_include_pad))
    return found
