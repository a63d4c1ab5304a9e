"""The weights of a layer's parts, so that together they answer as the layer did to what flows into it.

For layers that are linear, the squared error over all inputs x is tr(D G DT), with D the difference of the weights and
G the sum of x xT. So G takes the place of the data: the parts begin at factors of the weight that are best one by one,
in the metric of G, and are then trained together on that error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.factorize.parts import Shape, split, together
from compress.statistics.gram import Moments, matrix

diagonal: Callable[..., Tensor] = torch.block_diag

STEPS = 60
"""Of L-BFGS, each with a look or two at the error."""
DAMPING = 1e-4
"""Of the mean square of an input, added to each: what no sample shows is to be kept as well."""


def spread(moments: Moments | None, layer: nn.Module) -> Tensor:
    """The metric G [in, in] float64 of the layer's inputs, scaled to a mean of 1; the identity without moments.

    Round the mean where a bias can take it up.
    """
    width = matrix(layer).shape[1]
    if moments is None:
        return torch.eye(width, dtype=torch.float64)
    gram = moments.gram.double()
    if layer.bias is not None:
        gram = gram - torch.outer(moments.total.double(), moments.total.double()) / moments.count
    gram = gram / gram.diagonal().mean().clamp(min=1e-30)
    return gram + DAMPING * torch.eye(width, dtype=torch.float64)


def spectrum(weight: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """The energies of the directions of the layer's output, greatest first, [out], and the directions, [out, out].

    With the first r directions U, U UT W is the best weight of rank r in this metric: the singular values of W G^(1/2)
    (as in Chen et al., DRONE: Data-aware Low-rank Compression for Large NLP Models, 2021).
    """
    values, vectors = torch.linalg.eigh(weight @ metric @ weight.T)
    return values.flip(0).clamp(min=0), vectors.flip(1)


def begin(weight: Tensor, metric: Tensor, shape: Shape, kernel: tuple[int, int]) -> list[Tensor]:
    """Parts to begin with, in the order of their weights' elements. weight: [out, in x kernel] float64."""
    size, area = shape.size, kernel[0] * kernel[1]
    each = weight.reshape(len(weight), -1, area)  # [out, in, kernel]
    match shape.kind:
        case "low-rank":
            directions = spectrum(weight, metric)[1][:, :size]
            return [directions.T @ weight, directions]
        case "separable":
            filters = torch.linalg.svd(each.transpose(0, 1), full_matrices=False)[2][:, :size]
            first = diagonal(*filters)
            return [filters, answering(weight, metric, first)]
        case "grouped":
            wide, high = weight.shape[1] // size, weight.shape[0] // size
            parts = [slice(number * wide, (number + 1) * wide) for number in range(size)]
            outs = [spectrum(weight[:, part], metric[part, part])[1][:, :high] for part in parts]
            first = diagonal(*(out.T @ weight[:, part] for out, part in zip(outs, parts, strict=True)))
            firsts = [out.T @ weight[:, part] for out, part in zip(outs, parts, strict=True)]
            return [torch.cat(firsts), answering(weight, metric, first)]
        case "bottleneck":
            out = spectrum(weight, metric)[1][:, :size]
            inside = torch.linalg.svd(each.transpose(0, 1).flatten(1), full_matrices=False)[0][:, :size]
            return [inside.T, torch.einsum("or,oik,is->rsk", out, each, inside), out]
        case "spatial":
            left, values, right = torch.linalg.svd(turned(weight, kernel), full_matrices=False)
            root = values[:size].sqrt()
            return [root[:, None] * right[:size], (left[:, :size] * root).reshape(-1, kernel[1], size).transpose(1, 2)]


def turned(weight: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """A convolution's weight [out, in x kernel] as [out x width, in x height]: of the rank of the k x 1 and 1 x k
    convolutions that make it."""
    return weight.reshape(len(weight), -1, *kernel).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)


def answering(weight: Tensor, metric: Tensor, first: Tensor) -> Tensor:
    """The best last part [out, size] behind a first one [size, in]."""
    inner = first @ metric @ first.T
    inner += DAMPING * inner.diagonal().mean().clamp(min=1e-30) * torch.eye(len(inner), dtype=inner.dtype)
    last: Tensor = torch.linalg.solve(inner, first @ metric @ weight.T).T
    return last


def imitate(layer: nn.Module, moments: Moments | None, shape: Shape) -> tuple[nn.Sequential, float]:
    """The parts in the layer's place, and the squared error of their answers as a share of the answers' own square.

    moments: of what flows into the layer; without them every direction counts the same.
    """
    weight, metric = matrix(layer).detach().double(), spread(moments, layer)
    parts = split(layer, shape)
    layers: list[Any] = list(parts)
    kernel = layer.kernel_size if isinstance(layer, nn.Conv2d) else (1, 1)
    started = begin(weight, metric, shape, (kernel[0], kernel[1]))
    weights = [
        value.reshape(part.weight.shape).clone(memory_format=torch.contiguous_format)
        for value, part in zip(started, layers, strict=True)
    ]
    size = (weight @ metric * weight).sum().clamp(min=1e-30)

    def error() -> Tensor:
        gap = together(weights, shape) - weight
        return (gap @ metric * gap).sum() / size

    if shape.kind != "low-rank":  # of which the beginning is the best already
        train(weights, error)
    with torch.no_grad():
        for value, part in zip(weights, layers, strict=True):
            part.weight.copy_(value.detach())
        if layer.bias is not None:
            layers[-1].bias.copy_(layer.bias)
            if moments is not None:
                gap = weight - together([value.detach() for value in weights], shape)
                layers[-1].bias += gap @ moments.total.double() / moments.count
        return parts, float(error())


def train(weights: Sequence[Tensor], error: Callable[[], Tensor]) -> None:
    """Bring the error down, in place."""
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.LBFGS(weights, max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        found = error()
        found.backward()  # type: ignore[no-untyped-call]
        return float(found.detach())

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
