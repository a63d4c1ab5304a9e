"""Sparsification, and the base of its stages: selecting the layers, choosing the zeros, compensating for them, counting
them."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.criteria.criterion import Criterion, LayerStatistics, NamedCriterion, collect_statistics
from compress.criteria.sparsegpt import SparseGpt
from compress.prune.sparsity_pattern import FixedMask, SparsityPattern
from compress.statistics.layer_inputs import forward_batches
from compress.statistics.layer_weights import count_uses, weight_matrix, write_weight
from compress.statistics.moments import Moments, group_by_input, iterate_moments
from compress.statistics.optimal_brain_compression import compress_columns
from laconic.artifacts.record import Record
from laconic.data.dataset import Dataset
from laconic.errors import RecipeError
from laconic.models.checkpoint import Checkpoint
from laconic.models.layer_patterns import match_patterns
from laconic.recipes.stage import Property, TorchContext, TorchStage
from laconic.tasks.task import Task

KEPT = "the recipe keeps it"
TIED = "its weight is tied to another module's"

IDLE = "no sample runs through it"

InputOrder = Callable[[nn.Module], Tensor | None]
"""A permutation of a layer's inputs, [in] int64, that makes the inputs of one pattern group adjacent; None for their
own order."""


@dataclass(frozen=True)
class LayerSelection:
    """paths: of the layers that are sparsified, in the order of the module. skipped: the reasons why others are not, by
    path."""

    paths: tuple[str, ...]
    skipped: dict[str, str]

    def without(self, skipped: Mapping[str, str]) -> "LayerSelection":
        """Return the selection without these layers. Raises RecipeError if none is left."""
        paths = tuple(path for path in self.paths if path not in skipped)
        if not paths:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in list(skipped.items())[:3])
            raise RecipeError(f"no layer is left to prune: {reasons}. Name other layers")
        return LayerSelection(paths, {**self.skipped, **skipped})


def select_layers(module: nn.Module, layers: Sequence[str], keep: Sequence[str]) -> LayerSelection:
    """Return the linear and convolutional layers that a pattern of `layers` names and none of `keep`.

    A layer whose weight is tied to another module's, such as a language model's head to its embedding, is skipped.
    Raises RecipeError for a pattern that names no layer, or if none is left.
    """
    candidates = {
        path: layer for path, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d, Conv1D))
    }
    named = match_patterns(candidates, layers, "layers")
    uses = count_uses(module)
    tied = {path: TIED for path, layer in candidates.items() if uses[id(layer.weight)] > 1 and path in named}
    kept = match_patterns(candidates, keep, "keep")
    skipped = tied | {path: KEPT for path in candidates if path in kept}
    return LayerSelection(tuple(path for path in candidates if path in named), {}).without(skipped)


@torch.no_grad()
def sparsify(
    module: nn.Module,
    task: Task,
    dataset: Dataset,
    patterns: Mapping[str, SparsityPattern],
    criterion: Criterion,
    *,
    update: bool,
    seed: int = 0,
    order: InputOrder = lambda layer: None,
) -> None:
    """Zero weights of the layers at these paths, in place, by the pattern of each.

    update: adjust the remaining weights of a layer to compensate, as SparseGPT does. Where input statistics are needed,
    they are collected after all earlier layers have been sparsified. Weights that are zero already stay zero.
    """
    for path, statistics in iterate_statistics(
        module, task, dataset, list(patterns), criterion, update=update, seed=seed
    ):
        layer = module.get_submodule(path)
        places = order(layer)
        ordered = statistics if places is None else reorder_inputs(statistics, places)
        weight = prune_weight(ordered, patterns[path], criterion, update=update)
        write_weight(layer, weight if places is None else weight[:, places.argsort()])


def iterate_statistics(
    module: nn.Module,
    task: Task,
    dataset: Dataset,
    paths: Sequence[str],
    criterion: Criterion,
    *,
    update: bool,
    seed: int,
) -> Iterator[tuple[str, LayerStatistics]]:
    """Yield (path, statistics) of each layer, in execution order where moments are needed."""
    plain: dict[str, LayerStatistics] = {}
    if "moments" not in criterion.needs:
        plain = collect_statistics(criterion, module, task, dataset, paths, seed=seed)
    if not needs_inputs(criterion, update=update):
        yield from plain.items()
        return
    batches = list(forward_batches(task, dataset))
    for path, moments in iterate_moments(module, batches, group_by_input(module, batches[0], paths)):
        known = plain.get(path) or LayerStatistics(weight_matrix(module.get_submodule(path)).detach())
        yield path, replace(known, moments=moments)


def needs_inputs(criterion: Criterion, *, update: bool) -> bool:
    """Whether the inputs of the layers have to be observed."""
    return update or "moments" in criterion.needs


def skip_idle_layers(module: nn.Module, task: Task, dataset: Dataset, selection: LayerSelection) -> LayerSelection:
    """Return the selection without layers that do not run and therefore have no statistics. Raises RecipeError if none
    is left."""
    groups = group_by_input(module, next(forward_batches(task, dataset)), selection.paths)
    run = {path for group in groups for path in group.paths}
    return selection.without({path: IDLE for path in selection.paths if path not in run})


def score_nonzero(criterion: Criterion, statistics: LayerStatistics) -> Tensor:
    """Return the scores, [out, in]; those of zeros are below all others."""
    return criterion.score(statistics).masked_fill(statistics.weight == 0, -1.0)


def prune_weight(
    statistics: LayerStatistics, pattern: SparsityPattern, criterion: Criterion, *, update: bool
) -> Tensor:
    """Return the sparse weight, [out, in]."""
    weight, moments = statistics.weight, statistics.moments if update else None
    if moments and isinstance(criterion, SparseGpt):
        return prune_columns(weight, moments.gram, pattern)
    zeros = pattern.select_zeros(score_nonzero(criterion, statistics)) | (weight == 0)
    return prune_columns(weight, moments.gram, FixedMask(zeros)) if moments else weight.masked_fill(zeros, 0.0)


def prune_columns(weight: Tensor, gram: Tensor, pattern: SparsityPattern) -> Tensor:
    """Return the sparse weight [out, in], the remaining weights compensating for the zeros (Frantar & Alistarh,
    SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot, 2023).

    gram: the sum of x xT, [in, in]. Zeros stay zero. The pattern is given SparseGPT's scores of the weights as they
    have been adjusted by then; its span divides the block of the recursion.
    """
    zero_before, zeros = weight == 0, torch.empty_like(weight, dtype=torch.bool)

    def prune_column(left: Tensor, column: int, scale: Tensor) -> Tensor:
        if column % pattern.span == 0:
            end = min(column + pattern.span, weight.shape[1])
            scores = left[:, column:end].square() / scale[column:end].square()
            known = zero_before[:, column:end]
            zeros[:, column:end] = pattern.select_zeros(scores.masked_fill(known, -1.0), column) | known
        return left[:, column].masked_fill(zeros[:, column], 0.0)

    return compress_columns(weight, gram, prune_column).to(weight.dtype)


def reorder_inputs(statistics: LayerStatistics, places: Tensor) -> LayerStatistics:
    """Return the statistics with the inputs in another order."""
    moments = statistics.moments
    return LayerStatistics(
        statistics.weight[:, places],
        moments and Moments(moments.gram[places][:, places], moments.total[places], moments.count),
        None if statistics.gradient is None else statistics.gradient[:, places],
        None if statistics.squared_gradient is None else statistics.squared_gradient[:, places],
    )


def measure_sparsity(module: nn.Module, selection: LayerSelection) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the figures and the structure of a record: the sparsity of all selected layers together, of the whole
    model, and of each layer; and the reasons why other layers were skipped."""
    layers = {path: weight_matrix(module.get_submodule(path)) for path in selection.paths}
    zeros = {path: int((weight == 0).sum()) for path, weight in layers.items()}
    total = sum(weight.numel() for weight in layers.values())
    parameters = sum(parameter.numel() for parameter in module.parameters())
    zero_parameters = sum(int((parameter == 0).sum()) for parameter in module.parameters())
    figures = {"sparsity": sum(zeros.values()) / total, "sparsity of the model": zero_parameters / parameters}
    sparsities = {path: zeros[path] / weight.numel() for path, weight in layers.items()}
    return figures, {"layers": sparsities, "left": dict(selection.skipped)}


class SparsityStage(TorchStage):
    """Makes single weights of linear and convolutional layers zero; the layers keep their sizes.

    criterion: the importance criterion. update: whether the remaining weights of a layer compensate for the zeros, as
    in SparseGPT; by default only with its own criterion. layers: paths or patterns of the layers to sparsify; keep: of
    layers to leave alone, whatever `layers` says. samples: how many calibration samples to use.
    """

    makes: ClassVar[frozenset[Property]] = frozenset({"zeros"})
    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    lossy = True

    criterion: NamedCriterion = NamedCriterion(name="sparsegpt")
    update: Literal["none", "sparsegpt"] | None = None
    layers: tuple[str, ...] = ("*",)
    keep: tuple[str, ...] = ()
    samples: int = Field(default=128, ge=1)

    @property
    def importance_criterion(self) -> Criterion:
        """The criterion with its settings."""
        return self.criterion.make_criterion()

    @property
    def compensates(self) -> bool:
        """Whether the remaining weights compensate for the zeros."""
        return isinstance(self.importance_criterion, SparseGpt) if self.update is None else self.update == "sparsegpt"

    def prepare(self, checkpoint: Checkpoint, context: TorchContext) -> tuple[Checkpoint, Dataset, LayerSelection]:
        """Return a copy of the checkpoint to change, the calibration samples, and the layers. Raises RecipeError."""
        copied = replace(checkpoint, module=copy.deepcopy(checkpoint.module))
        dataset = context.calibrate.take(self.samples, context.seed)
        selection = select_layers(copied.module, self.layers, self.keep)
        if needs_inputs(self.importance_criterion, update=self.compensates):
            selection = skip_idle_layers(copied.module, context.task, dataset, selection)
        return copied, dataset, selection

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Do nothing: zeros change no structure."""
