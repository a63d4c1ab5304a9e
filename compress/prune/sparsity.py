"""Zeros in the weights of a model: how they come about, and what is said of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.criteria.criterion import Criterion, Evidence, gather
from compress.criteria.sparsegpt import SparseGpt
from compress.prune.column_pruning import compensated
from compress.prune.execution_order import settled, waves
from compress.prune.layer_selection import Chosen
from compress.prune.pattern import Fixed, Pattern
from compress.statistics.gram import Moments, forward_batches, matrix
from laconic.data.dataset import Dataset
from laconic.tasks.task import Task

IDLE = "no sample runs through it"

Order = Callable[[nn.Module], Tensor | None]
"""Of a layer's inputs, [in] int64, so that those which a pattern takes together are neighbours; None for their own."""


@torch.no_grad()
def sparsify(
    module: nn.Module,
    task: Task,
    dataset: Dataset,
    patterns: Mapping[str, Pattern],
    criterion: Criterion,
    *,
    update: bool,
    seed: int = 0,
    order: Order = lambda layer: None,
) -> None:
    """Put zeros into the layers at these paths, in place, as the pattern of each has it.

    update: let the other weights of a layer make up for each that goes, as SparseGPT does. Where it matters what flows
    into a layer, that is looked at when all layers before it are pruned. What is zero already stays so.
    """
    for path, evidence in settling(module, task, dataset, list(patterns), criterion, update=update, seed=seed):
        layer = module.get_submodule(path)
        places = order(layer)
        given = evidence if places is None else ordered(evidence, places)
        found = pruned(given, patterns[path], criterion, update=update)
        put(layer, found if places is None else found[:, places.argsort()])


def settling(
    module: nn.Module,
    task: Task,
    dataset: Dataset,
    paths: Sequence[str],
    criterion: Criterion,
    *,
    update: bool,
    seed: int,
) -> Iterator[tuple[str, Evidence]]:
    """(path, evidence) of each layer, in the order in which they run where moments are needed."""
    plain: dict[str, Evidence] = {}
    if "moments" not in criterion.needs:
        plain = gather(criterion, module, task, dataset, paths, seed=seed)
    if not watches(criterion, update=update):
        yield from plain.items()
        return
    given = list(forward_batches(task, dataset))
    for path, moments in settled(module, given, waves(module, given[0], paths)):
        known = plain.get(path) or Evidence(matrix(module.get_submodule(path)).detach())
        yield path, replace(known, moments=moments)


def watches(criterion: Criterion, *, update: bool) -> bool:
    """Whether it must be known what flows into the layers."""
    return update or "moments" in criterion.needs


def running(module: nn.Module, task: Task, dataset: Dataset, chosen: Chosen) -> Chosen:
    """Without the layers that do not run, of which nothing can be known. Raises RecipeError where none is left."""
    found = waves(module, next(forward_batches(task, dataset)), chosen.paths)
    run = {path for wave in found for path in wave.paths}
    return chosen.without({path: IDLE for path in chosen.paths if path not in run})


def scored(criterion: Criterion, evidence: Evidence) -> Tensor:
    """The scores, [out, in], those of zeros below all others."""
    return criterion.scores(evidence).masked_fill(evidence.weight == 0, -1.0)


def pruned(evidence: Evidence, pattern: Pattern, criterion: Criterion, *, update: bool) -> Tensor:
    """The weight [out, in] with its zeros."""
    weight, moments = evidence.weight, evidence.moments
    if update and isinstance(criterion, SparseGpt):
        assert moments is not None
        return compensated(weight, moments.gram, pattern)
    zeros = pattern.zeros(scored(criterion, evidence)) | (weight == 0)
    if update:
        assert moments is not None
        return compensated(weight, moments.gram, Fixed(zeros))
    return weight.masked_fill(zeros, 0.0)


def ordered(evidence: Evidence, places: Tensor) -> Evidence:
    """The same, of inputs in another order."""
    moments = evidence.moments
    return Evidence(
        evidence.weight[:, places],
        moments and Moments(moments.gram[places][:, places], moments.total[places], moments.count),
        None if evidence.gradient is None else evidence.gradient[:, places],
        None if evidence.squared is None else evidence.squared[:, places],
    )


def put(layer: nn.Module, found: Tensor) -> None:
    """Give a layer this weight, [out, in]."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    weight.copy_(found.T if isinstance(layer, Conv1D) else found.reshape(weight.shape))


def counted(module: nn.Module, chosen: Chosen) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures and the structure of a record: the share of zeros in all pruned layers together, and in all weights
    of the model; in each of the layers; and why others were left as they are."""
    layers = {path: matrix(module.get_submodule(path)) for path in chosen.paths}
    zeros = {path: int((weight == 0).sum()) for path, weight in layers.items()}
    total = sum(weight.numel() for weight in layers.values())
    everything = sum(parameter.numel() for parameter in module.parameters())
    nought = sum(int((parameter == 0).sum()) for parameter in module.parameters())
    figures = {"sparsity": sum(zeros.values()) / total, "sparsity of the model": nought / everything}
    shares = {path: zeros[path] / weight.numel() for path, weight in layers.items()}
    return figures, {"layers": shares, "left": dict(chosen.left)}
