"""Channel pruning of convolutional networks, through all layers that share the channels."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.criteria.criterion import NamedCriterion
from compress.prune.channel_allocation import RankedGroup, allocate_channels, measure_importance
from compress.prune.channel_groups import NORMS, ChannelGroup, find_channel_groups, get_layer
from compress.prune.channel_surgery import (
    Removal,
    collect_removed,
    mask_channels,
    remaining_indices,
    remove_channels,
)
from compress.statistics.layer_inputs import forward_batches
from compress.statistics.layer_weights import weight_matrix
from compress.statistics.least_squares import is_refittable, refit_layers
from compress.transformer.proof import TOLERANCE, relative_difference
from compress.transformer.surgery import diff_sizes, read_sizes, resize_layers
from laconic.artifacts.record import Record
from laconic.data.dataset import Dataset
from laconic.errors import PruningError, UsageError
from laconic.models.checkpoint import Checkpoint
from laconic.models.hooks import forward_hooks
from laconic.models.layer_patterns import match_patterns
from laconic.models.signature import call
from laconic.recipes.stage import Property, TorchContext, TorchStage
from laconic.tasks.task import Task
from laconic.units import Share

ROWS = 16
"""Samples that a cut is proved on."""
NORM_ROWS = 64
"""Samples of a batch for recalibrating batch normalisation."""


class Channels(TorchStage):
    """Prune channels of a convolutional network. Residual sums, concatenations, depthwise and grouped convolutions and
    flattened images are followed; the channels of the outputs are left alone.

    keep: the share of each channel group that stays; with allocate: sensitivity, groups share what uniform pruning to
    this share would leave of the multiplications, by the measured sensitivity of the output to each. criterion: the
    importance criterion. round_to: the number of channels is rounded up to a multiple of this, for the hardware. steps:
    prune in so many steps, with new scores before each. compensate: refit the layers that read the channels, by least
    squares. recalibrate_batch_norm: compute the statistics of batch normalisation anew. Both are discarded where the
    outputs do not get better. ignored_layers: groups of channels that all stay, by path or pattern of the layer where
    they begin. samples: how many calibration samples to use.
    """

    lossy: ClassVar[bool] = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges"})
    renamed: ClassVar[Mapping[str, str]] = {
        "multiple": "round_to",
        "reestimate": "recalibrate_batch_norm",
        "whole": "ignored_layers",
    }

    keep: Share = Field(default=0.75, gt=0, lt=1)
    criterion: NamedCriterion = NamedCriterion(name="magnitude")
    round_to: int = Field(default=8, ge=1)
    allocate: Literal["uniform", "sensitivity"] = "uniform"
    steps: int = Field(default=1, ge=1)
    compensate: bool = True
    recalibrate_batch_norm: bool = True
    ignored_layers: tuple[str, ...] = ()
    samples: int = Field(default=256, ge=1)

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        """Return the checkpoint with fewer channels. Raises UsageError if nothing can be pruned, RecipeError for a
        pattern that matches nothing, PruningError where the proof fails."""
        pruner = ChannelPruner(self, checkpoint, context)
        with context.steps.step("prune channels", self.steps) as step:
            for number in range(1, self.steps + 1):
                pruner.prune(1 - (1 - self.keep) * number / self.steps)
                step.advance()
            before, after = count_parameters(checkpoint.module), count_parameters(pruner.module)
            step.note = f"{after / before:.0%} of {before} weights left, proved to {pruner.error:.1g}"
        structure = diff_sizes(read_sizes(checkpoint.module), read_sizes(pruner.module))
        figures = {"proof": pruner.error, "weights": float(after), "weights before": float(before)}
        record = self.make_record("prune.channels", checkpoint, context, figures, structure)
        return checkpoint.after(record, pruner.module)

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Give the layers of an empty module the same sizes."""
        resize_layers(module, record.structure)


class ChannelPruner:
    """Prunes a copy of a checkpoint's module, in one or several steps.

    module: the result so far. error: the largest error of the proofs. rows: the remaining outputs of each layer, as
    indices in the original. widths: of the groups in the original.
    """

    def __init__(self, stage: Channels, checkpoint: Checkpoint, context: TorchContext) -> None:
        self.stage, self.checkpoint, self.context = stage, checkpoint, context
        self.criterion = stage.criterion.make_criterion()
        self.dataset = context.calibrate.take(stage.samples, context.seed)
        self.batch = next(forward_batches(checkpoint.task, self.dataset, ROWS))
        self.module = copy.deepcopy(checkpoint.module)
        self.pruned, self.error = False, 0.0
        self.rows: dict[str, Tensor] = {}
        self.widths: dict[str, int] = {}

    def prune(self, share: float) -> None:
        """Reduce each group to this share of its original width. Raises UsageError if nothing can be pruned."""
        groups = find_channel_groups(self.module, self.batch)
        names = [group.name for group in groups]
        ignored = match_patterns(names, self.stage.ignored_layers, "ignored_layers", "group of channels")
        for group in groups:
            self.widths.setdefault(group.name, group.width)
        free = [group for group in groups if group.name not in ignored]
        goals = {group.name: self.target_width(group, share) for group in free}
        free = [group for group in free if goals[group.name] < group.width]
        orders = dict(zip([group.name for group in free], self.rank_channels(free), strict=True)) if free else {}
        free = [group for group in free if self.is_provable(group, orders[group.name][goals[group.name] :])]
        if not free and (self.pruned or share > self.stage.keep + 1e-9):
            return  # another step, before or after, prunes more
        if not groups:
            raise UsageError(
                "prune.channels found nothing to prune: no layer's channels are read by layers alone, so that they "
                "could be removed with their weights. Use prune.unstructured"
            )
        if not free:
            raise UsageError(
                f"prune.channels found nothing to prune: of {len(groups)} groups of channels, of the widths "
                f"{sorted({group.width for group in groups})}, none could be proved with fewer channels at keep: "
                f"{share:.2g} and round_to: {self.stage.round_to}. Try a smaller round_to, or a smaller keep"
            )
        if self.stage.allocate == "sensitivity":
            ranked = [RankedGroup(group, orders[group.name], self.width_step(group)) for group in free]
            uniform = [goals[group.name] for group in free]
            counts = allocate_channels(ranked, uniform, self.module, self.batch, self.fidelity)
            goals |= dict(zip([group.name for group in free], counts, strict=True))
        self.remove([(group, orders[group.name][goals[group.name] :]) for group in free])

    def width_step(self, group: ChannelGroup) -> int:
        """Return the number that a group's width is a multiple of."""
        return math.lcm(self.stage.round_to, len(group.lanes))

    def target_width(self, group: ChannelGroup, share: float) -> int:
        """Return how many channels a group is to keep, rounded up."""
        step = self.width_step(group)
        return min(math.ceil(share * self.widths[group.name] / step - 1e-9) * step, group.width)

    def is_provable(self, group: ChannelGroup, channels: Sequence[int]) -> bool:
        """Whether the removal of these channels of this group alone can be proved."""
        try:
            return prove_removal(self.module, collect_removed([(group, channels)]), self.batch)[1] <= TOLERANCE
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return False  # some operation depends on the width

    def rank_channels(self, groups: Sequence[ChannelGroup]) -> list[list[int]]:
        """Return the channels of each group in descending order of importance; lanes take turns."""
        task, seed = self.checkpoint.task, self.context.seed
        importances = measure_importance(self.criterion, self.module, task, self.dataset, groups, seed)
        ordered = []
        for group, importance in zip(groups, importances, strict=True):
            lanes = [sorted(lane, key=lambda channel: (-float(importance[channel]), channel)) for lane in group.lanes]
            ordered.append([channel for rank in zip(*lanes, strict=True) for channel in rank])
        return ordered

    def remove(self, chosen: Sequence[tuple[ChannelGroup, Sequence[int]]]) -> None:
        """Remove channels of groups, prove it, and compensate. Raises PruningError where the proof fails."""
        removal = collect_removed(chosen)
        narrowed, error = prove_removal(self.module, removal, self.batch)
        if not error <= TOLERANCE:
            raise PruningError(
                f"prune.channels: the smaller model's outputs differ by {error:.2g} of the largest from those of the "
                f"model with the same channels masked; expected at most {TOLERANCE:g}. The groups that begin at "
                f"{[group.name for group, _ in chosen]} have a dependency that was not found. Name some in "
                f"ignored_layers"
            )
        self.pruned, self.error = True, max(self.error, error)
        for path, removed in removal.items():
            layer = get_layer(self.module, path)
            if isinstance(layer, nn.Module) and is_refittable(layer):
                rows = self.rows.get(path, torch.arange(weight_matrix(layer).shape[0]))
                self.rows[path] = rows[remaining_indices(len(rows), removed.rows)]
        self.module = self.compensate(narrowed)

    def compensate(self, narrowed: nn.Module) -> nn.Module:
        """Return the narrowed module, or one with refitted layers and recalibrated batch normalisation, whichever has
        the highest fidelity."""
        task, candidates = self.checkpoint.task, [narrowed]
        if self.stage.compensate:
            original = self.checkpoint.module
            paths = [
                path
                for path in execution_order(narrowed, self.batch)
                if is_refittable(layer := narrowed.get_submodule(path))
                and weight_matrix(layer).shape[1] < weight_matrix(original.get_submodule(path)).shape[1]
            ]
            fitted = copy.deepcopy(narrowed)
            refit_layers(fitted, original, task, self.dataset, dict(zip(paths, paths, strict=True)), self.rows)
            candidates.append(fitted)
        if self.stage.recalibrate_batch_norm and any(isinstance(layer, NORMS) for layer in narrowed.modules()):
            candidates += [recalibrate_batch_norm(module, task, self.dataset) for module in candidates]
        return max(candidates, key=self.fidelity) if len(candidates) > 1 else narrowed

    def fidelity(self, module: nn.Module) -> float:
        """Return the mean fidelity of a module's outputs to the original's."""
        return float(self.context.fidelity(replace(self.checkpoint, module=module)).mean())


def prove_removal(module: nn.Module, removal: Removal, batch: Mapping[str, Tensor]) -> tuple[nn.Module, float]:
    """Return the module without these channels, and the largest difference between its outputs and those of the module
    with the channels masked, as a share of the largest output."""
    masked, narrowed = copy.deepcopy(module), copy.deepcopy(module)
    mask_channels(masked, removal)
    remove_channels(narrowed, removal)
    with torch.no_grad():
        expected, outputs = call(masked, batch), call(narrowed, batch)
    error = 0.0
    for name, output in expected.items():
        difference = relative_difference(output, outputs[name])
        error = max(error, math.inf if math.isnan(difference) else difference)
    return narrowed, error


def execution_order(module: nn.Module, batch: Mapping[str, Tensor]) -> list[str]:
    """Return the paths of the layers with parameters, in the order in which they run."""
    order: dict[str, None] = {}

    def record(path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        order.setdefault(path)

    layers = [(path, layer) for path, layer in module.named_modules() if path and not list(layer.children())]
    paths = [path for path, layer in layers if list(layer.parameters())]
    with torch.no_grad(), forward_hooks(module, paths, before=record):
        call(module, batch)
    return list(order)


@torch.no_grad()
def recalibrate_batch_norm(module: nn.Module, task: Task, dataset: Dataset) -> nn.Module:
    """Return a copy whose batch normalisation layers have the statistics of these samples."""
    module = copy.deepcopy(module)
    norms = [layer for layer in module.modules() if isinstance(layer, NORMS) and layer.track_running_stats]
    momenta = [layer.momentum for layer in norms]
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
        layer.train()
    for batch in forward_batches(task, dataset, NORM_ROWS):
        if len(next(iter(batch.values()))) > 1 or len(dataset) == 1:
            call(module, batch)
    for layer, momentum in zip(norms, momenta, strict=True):
        layer.momentum = momentum
    return module.eval()


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
