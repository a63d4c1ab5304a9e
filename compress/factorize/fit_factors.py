"""Fit the weights of a layer's factors so that together they give the layer's outputs on the calibration inputs.

For linear layers the squared error over all inputs x is tr(D G DT), with D the difference of the weights and G the sum
of x xT. So G replaces the data: each factor is initialised with the factor of the weight that is best by itself in the
metric of G, and then all are optimised together on that error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.factorize.factors import Factorization, compose_weight, make_factors
from compress.statistics.layer_weights import weight_matrix
from compress.statistics.moments import Moments

block_diagonal: Callable[..., Tensor] = torch.block_diag

STEPS = 60
"""Iterations of L-BFGS, each with one or two evaluations of the error."""
DAMPING = 1e-4
"""Added to the mean square of each input, as a share of their mean: directions without samples are kept as well."""


def input_metric(moments: Moments | None, layer: nn.Module) -> Tensor:
    """Return the metric G [in, in] float64 of the layer's inputs, of mean diagonal 1; the identity without moments.

    Centred if the layer has a bias, which absorbs the mean.
    """
    width = weight_matrix(layer).shape[1]
    if moments is None:
        return torch.eye(width, dtype=torch.float64)
    gram = moments.gram.double() if layer.bias is None else moments.centred()
    gram = gram / gram.diagonal().mean().clamp(min=1e-30)
    return gram + DAMPING * torch.eye(width, dtype=torch.float64)


def output_spectrum(weight: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return the energies of the principal directions of the layer's output, descending, [out], and these, [out, out].

    With the first r directions U, U UT W is the best weight of rank r in this metric: the singular values of W G^(1/2)
    (as in Chen et al., DRONE: Data-aware Low-rank Compression for Large NLP Models, 2021).
    """
    values, vectors = torch.linalg.eigh(weight @ metric @ weight.T)
    return values.flip(0).clamp(min=0), vectors.flip(1)


def initialize_factors(
    weight: Tensor, metric: Tensor, factorization: Factorization, kernel: tuple[int, int]
) -> list[Tensor]:
    """Return initial factors, in the order of their weights' elements. weight: [out, in x kernel] float64."""
    size, area = factorization.size, kernel[0] * kernel[1]
    kernels = weight.reshape(len(weight), -1, area)  # [out, in, kernel]
    match factorization.kind:
        case "low-rank":
            directions = output_spectrum(weight, metric)[1][:, :size]
            return [directions.T @ weight, directions]
        case "separable":
            filters = torch.linalg.svd(kernels.transpose(0, 1), full_matrices=False)[2][:, :size]
            first = block_diagonal(*filters)
            return [filters, solve_last_factor(weight, metric, first)]
        case "grouped":
            wide, high = weight.shape[1] // size, weight.shape[0] // size
            parts = [slice(number * wide, (number + 1) * wide) for number in range(size)]
            outs = [output_spectrum(weight[:, part], metric[part, part])[1][:, :high] for part in parts]
            firsts = [out.T @ weight[:, part] for out, part in zip(outs, parts, strict=True)]
            return [torch.cat(firsts), solve_last_factor(weight, metric, block_diagonal(*firsts))]
        case "bottleneck":
            out = output_spectrum(weight, metric)[1][:, :size]
            inside = torch.linalg.svd(kernels.transpose(0, 1).flatten(1), full_matrices=False)[0][:, :size]
            return [inside.T, torch.einsum("or,oik,is->rsk", out, kernels, inside), out]
        case "spatial":
            left, values, right = torch.linalg.svd(spatial_matrix(weight, kernel), full_matrices=False)
            root = values[:size].sqrt()
            return [root[:, None] * right[:size], (left[:, :size] * root).reshape(-1, kernel[1], size).transpose(1, 2)]


def spatial_matrix(weight: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Return a convolution's weight [out, in x kernel] as [out x width, in x height]. Its rank is the number of
    channels between the k x 1 and 1 x k convolutions that compose to it."""
    return weight.reshape(len(weight), -1, *kernel).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)


def solve_last_factor(weight: Tensor, metric: Tensor, first: Tensor) -> Tensor:
    """Return the best last factor [out, size] after a first factor [size, in]."""
    inner = first @ metric @ first.T
    inner += DAMPING * inner.diagonal().mean().clamp(min=1e-30) * torch.eye(len(inner), dtype=inner.dtype)
    last: Tensor = torch.linalg.solve(inner, first @ metric @ weight.T).T
    return last


def fit_factors(layer: nn.Module, moments: Moments | None, factorization: Factorization) -> tuple[nn.Sequential, float]:
    """Return the fitted factors of a layer, and their squared output error as a share of the squared output.

    moments: of the layer's inputs; without them all input directions have the same weight.
    """
    weight, metric = weight_matrix(layer).detach().double(), input_metric(moments, layer)
    parts = make_factors(layer, factorization)
    layers: list[Any] = list(parts)
    kernel = layer.kernel_size if isinstance(layer, nn.Conv2d) else (1, 1)
    started = initialize_factors(weight, metric, factorization, (kernel[0], kernel[1]))
    weights = [
        value.reshape(part.weight.shape).clone(memory_format=torch.contiguous_format)
        for value, part in zip(started, layers, strict=True)
    ]
    size = (weight @ metric * weight).sum().clamp(min=1e-30)

    def error() -> Tensor:
        gap = compose_weight(weights, factorization) - weight
        return (gap @ metric * gap).sum() / size

    if factorization.kind != "low-rank":  # whose initial factors are optimal already
        minimize(weights, error)
    with torch.no_grad():
        for value, part in zip(weights, layers, strict=True):
            part.weight.copy_(value.detach())
        if layer.bias is not None:
            layers[-1].bias.copy_(layer.bias)
            if moments is not None:
                gap = weight - compose_weight([value.detach() for value in weights], factorization)
                layers[-1].bias += gap @ moments.total.double() / moments.count
        return parts, float(error())


def minimize(weights: Sequence[Tensor], error: Callable[[], Tensor]) -> None:
    """Minimise the error by L-BFGS, in place."""
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.LBFGS(weights, max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        value = error()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
