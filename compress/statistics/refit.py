"""Layers fitted anew by least squares, so that they answer to what flows into them now as their originals answered."""

from collections.abc import Generator, Mapping
from contextlib import closing

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.statistics.gram import ROWS, Moments, flows, forward_batches, matrix
from laconic.data.dataset import Dataset
from laconic.tasks.task import Task

RIDGE = 1e-3
"""How strongly a weight is held where it is, as a share of the mean square of an input. On digits, channels halved and
60 samples: 1e-4 and 1e-2 are within half a point."""

SAMPLES, ENOUGH = 64, 32
"""A fit has seen enough after so many samples, if these were so many inputs for each weight of an output: an image has
many patches."""


def fits(layer: nn.Module) -> bool:
    """Whether a layer is one that can be fitted: linear, or a convolution in one group."""
    return isinstance(layer, (nn.Linear, Conv1D)) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)


@torch.no_grad()
def refit(
    module: nn.Module,
    original: nn.Module,
    task: Task,
    dataset: Dataset,
    paths: Mapping[str, str],
    rows: Mapping[str, Tensor] | None = None,
) -> None:
    """Fit the layers at these paths, in place, one after the other in this order.

    paths: of the layers, and for each that of the original's layer whose answers are aimed at, in the original's own
    activations, so that what was lost before a layer is made good as well. rows: which of the original's outputs a
    layer still has, where it has not all of them. Costs two passes over the data a layer, or a part of the data.
    """
    for path, aim in paths.items():
        seen, cross, total = together(module, original, task, dataset, path, aim)
        if seen is not None:
            left = None if rows is None else rows.get(path)
            solve(module.get_submodule(path), original.get_submodule(aim), seen, cross, total, left)


def together(
    module: nn.Module, original: nn.Module, task: Task, dataset: Dataset, path: str, aim: str
) -> tuple[Moments | None, Tensor, Tensor]:
    """The moments of a layer's inputs x, None where it does not run; the sum of x' xT, x' being the original's,
    [in', in]; the sum of x', [in']."""
    seen, cross, total = None, torch.zeros(()), torch.zeros(())
    with closing(inputs(module, task, dataset, path)) as now, closing(inputs(original, task, dataset, aim)) as then:
        for number, (x, before) in enumerate(zip(now, then, strict=True), 1):
            if seen is None:
                seen = Moments(x.new_zeros(x.shape[1], x.shape[1]), x.new_zeros(x.shape[1]), 0)
                cross, total = x.new_zeros(before.shape[1], x.shape[1]), x.new_zeros(before.shape[1])
            seen.gram.addmm_(x.T, x)
            seen.total += x.sum(dim=0)
            seen.count += len(x)
            cross.addmm_(before.T, x)
            total += before.sum(dim=0)
            if number * ROWS >= SAMPLES and seen.count >= ENOUGH * x.shape[1]:
                break
    return seen, cross, total


def inputs(module: nn.Module, task: Task, dataset: Dataset, path: str) -> Generator[Tensor, None, None]:
    """What flows into a layer, [count, in], batch by batch."""
    for _, x in flows(module, forward_batches(task, dataset), [path]):
        yield x


def solve(
    layer: nn.Module, original: nn.Module, seen: Moments, cross: Tensor, total: Tensor, rows: Tensor | None
) -> None:
    """The weight and the bias with the least squared error, the weight held near where it is."""
    weight, before = matrix(layer).double(), matrix(original).double()
    before = before if rows is None else before[rows]
    gram, cross, sums, then = (each.double() for each in (seen.gram, cross, seen.total, total))
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    if bias is not None:  # a bias takes up the means
        gram = gram - torch.outer(sums, sums) / seen.count
        cross = cross - torch.outer(then, sums) / seen.count
    held = RIDGE * gram.diagonal().mean().clamp(min=1e-12)
    system = gram + held * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    change = torch.linalg.solve(system, (before @ cross - weight @ gram).T).T
    fitted = weight + change
    matrix(layer).copy_(fitted)
    if bias is not None:
        old: Tensor = original.bias  # type: ignore[assignment]
        bias.copy_((old if rows is None else old[rows]).double() + (before @ then - fitted @ sums) / seen.count)
