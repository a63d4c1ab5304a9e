"""Channels of convolutional networks cut out, through all layers that share them."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.criteria.criterion import Criterion
from compress.prune.channel_allocation import Plan, shared
from compress.prune.channel_importance import worths
from compress.prune.channel_surgery import Cuts, cuts_of, find, left, mask, narrow
from compress.prune.coupling import NORMS, Group, couple
from compress.statistics.gram import forward_batches, matrix
from compress.statistics.refit import fits, refit
from compress.transformer.proof import TOLERANCE, distance
from compress.transformer.shapes import changes, resize, sizes
from laconic.artifacts.record import Record
from laconic.config import NamedSettings
from laconic.data.dataset import Dataset
from laconic.errors import PruningError, RecipeError, UsageError
from laconic.hashing import code_version, hash_of
from laconic.models.signature import call
from laconic.recipes.stage import Property, TorchContext, TorchStage, dump_settings
from laconic.registry import did_you_mean
from laconic.tasks.task import Task
from laconic.units import Share

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

ROWS = 16
"""Samples that a cut is proved on."""
NORM_ROWS = 64
"""Samples that statistics of a batch normalisation are taken over at once."""


class Channels(TorchStage):
    """Cut channels of a convolutional network: residual sums, concatenations, depthwise and grouped convolutions and
    flattened images are followed, and what reaches an output is left alone.

    keep: the share of each group of channels that stays; with allocate: sensitivity, the share of what uniform cutting
    to this share would leave of the multiplications, spread by what each group's cut does to the answers. criterion:
    which channels matter. multiple: what counts of channels are rounded up to, for the hardware. steps: the cut is
    taken in so many, the criterion asked before each. compensate: fit the layers that took the channels anew, by least
    squares. reestimate: take the statistics of batch normalisations anew. Both are left where the answers are no better
    for it. whole: groups of channels that all stay, by name or pattern of the layer where they begin. samples: how many
    to look at.
    """

    lossy: ClassVar[bool] = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges"})

    keep: Share = Field(default=0.75, gt=0, lt=1)
    criterion: NamedSettings = NamedSettings(name="magnitude")
    multiple: int = Field(default=8, ge=1)
    allocate: Literal["uniform", "sensitivity"] = "uniform"
    steps: int = Field(default=1, ge=1)
    compensate: bool = True
    reestimate: bool = True
    whole: tuple[str, ...] = ()
    samples: int = Field(default=256, ge=1)

    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        surgery = Surgery(self, checkpoint, context)
        with context.steps.step("prune channels", self.steps) as step:
            for number in range(1, self.steps + 1):
                surgery.cut(1 - (1 - self.keep) * number / self.steps)
                step.advance()
            before, after = weights(checkpoint.module), weights(surgery.module)
            step.note = f"{after / before:.0%} of {before} weights left, proved to {surgery.error:.1g}"
        made = changes(sizes(checkpoint.module), sizes(surgery.module))
        key = hash_of(context.key, checkpoint.key, "prune.channels", dump_settings(self), code_version())
        figures = {"proof": surgery.error, "weights": float(after), "weights before": float(before)}
        record = Record(stage="prune.channels", config=dump_settings(self), key=key, figures=figures, structure=made)
        return checkpoint.after(record, surgery.module)

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        resize(module, record.structure)


class Surgery:
    """A cut, perhaps in several steps, of a copy of a checkpoint's module.

    module: what is left so far. error: the largest of the proofs. rows: which of a layer's outputs at the beginning are
    left. widths: of the groups, at the beginning.
    """

    def __init__(self, stage: Channels, checkpoint: "Checkpoint", context: TorchContext) -> None:
        self.stage, self.checkpoint, self.context = stage, checkpoint, context
        self.criterion: Criterion = stage.criterion.configure("criterion", Criterion)
        self.dataset = context.calibrate.take(stage.samples, context.seed)
        self.batch = next(forward_batches(checkpoint.task, self.dataset, ROWS))
        self.module = copy.deepcopy(checkpoint.module)
        self.operated, self.error = False, 0.0
        self.rows: dict[str, Tensor] = {}
        self.widths: dict[str, int] = {}

    def cut(self, share: float) -> None:
        """Leave this share of what each group had at the beginning. Raises UsageError where nothing can be cut."""
        groups = couple(self.module, self.batch)
        check(self.stage.whole, [group.name for group in groups])
        for group in groups:
            self.widths.setdefault(group.name, group.width)
        free = [group for group in groups if not chosen(group.name, self.stage.whole)]
        goals = {group.name: self.target(group, share) for group in free}
        free = [group for group in free if goals[group.name] < group.width]
        orders = dict(zip([group.name for group in free], self.orders(free), strict=True)) if free else {}
        free = [group for group in free if self.stands(group, orders[group.name][goals[group.name] :])]
        if not free and (self.operated or share > self.stage.keep + 1e-9):
            return  # another step, before or after, has more to cut
        if not free:
            raise UsageError(
                f"prune.channels found nothing to cut: of {len(groups)} groups of channels, of the widths "
                f"{sorted({group.width for group in groups})}, none is left with fewer at keep: {share:.2g} and "
                f"multiple: {self.stage.multiple} that could be proved. Try a smaller multiple, or a smaller keep"
            )
        if self.stage.allocate == "sensitivity":
            plans = [Plan(group, orders[group.name], self.step(group)) for group in free]
            uniform = [goals[group.name] for group in free]
            counts = shared(plans, uniform, self.module, self.batch, self.fidelity)
            goals |= dict(zip([group.name for group in free], counts, strict=True))
        self.operate([(group, orders[group.name][goals[group.name] :]) for group in free])

    def step(self, group: Group) -> int:
        """What a group's counts are multiples of."""
        return math.lcm(self.stage.multiple, len(group.lanes))

    def target(self, group: Group, share: float) -> int:
        """How many channels a group is to keep: rounded up."""
        step = self.step(group)
        return min(math.ceil(share * self.widths[group.name] / step - 1e-9) * step, group.width)

    def stands(self, group: Group, channels: Sequence[int]) -> bool:
        """Whether a group is understood: with these channels gone, and no others, the cut can be proved."""
        try:
            return proof(self.module, cuts_of([(group, channels)]), self.batch)[1] <= TOLERANCE
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return False  # some operation counts on the width

    def orders(self, groups: Sequence[Group]) -> list[list[int]]:
        """The channels of each group, those to keep longest first; lanes take turns."""
        found = worths(self.criterion, self.module, self.checkpoint.task, self.dataset, groups, self.context.seed)
        ordered = []
        for group, worth in zip(groups, found, strict=True):
            lanes = [sorted(lane, key=lambda channel: (-float(worth[channel]), channel)) for lane in group.lanes]
            ordered.append([channel for rank in zip(*lanes, strict=True) for channel in rank])
        return ordered

    def operate(self, going: Sequence[tuple[Group, Sequence[int]]]) -> None:
        """Take these channels of these groups out, prove it, and make good what can be.

        Raises PruningError where the proof fails.
        """
        cuts = cuts_of(going)
        narrowed, error = proof(self.module, cuts, self.batch)
        if not error <= TOLERANCE:
            raise PruningError(
                f"prune.channels: the smaller model's answers differ by {error:.2g} of the largest from those of the "
                f"model with the same channels silent; expected at most {TOLERANCE:g}. The groups that begin at "
                f"{[group.name for group, _ in going]} depend on one another by something unseen. Name some in whole"
            )
        self.operated, self.error = True, max(self.error, error)
        for path, cut in cuts.items():
            layer = find(self.module, path)
            if isinstance(layer, nn.Module) and fits(layer):
                held = self.rows.get(path, torch.arange(matrix(layer).shape[0]))
                self.rows[path] = held[left(len(held), cut.rows)]
        self.module = self.mended(narrowed)

    def mended(self, narrowed: nn.Module) -> nn.Module:
        """The cut module, or with layers fitted and statistics taken anew, whichever answers best."""
        task, found = self.checkpoint.task, [narrowed]
        if self.stage.compensate:
            original = self.checkpoint.module
            paths = [
                path
                for path in running(narrowed, self.batch)
                if fits(layer := narrowed.get_submodule(path))
                and matrix(layer).shape[1] < matrix(original.get_submodule(path)).shape[1]
            ]
            fitted = copy.deepcopy(narrowed)
            refit(fitted, original, task, self.dataset, dict(zip(paths, paths, strict=True)), self.rows)
            found.append(fitted)
        if self.stage.reestimate and any(isinstance(layer, NORMS) for layer in narrowed.modules()):
            found += [reestimated(module, task, self.dataset) for module in found]
        return max(found, key=self.fidelity) if len(found) > 1 else narrowed

    def fidelity(self, module: nn.Module) -> float:
        """Of a module's answers to the original's, the mean."""
        return float(self.context.fidelity(replace(self.checkpoint, module=module)).mean())


def proof(module: nn.Module, cuts: Cuts, batch: Mapping[str, Tensor]) -> tuple[nn.Module, float]:
    """The module without these channels, and by how much its answers differ from those of the module with the channels
    silent: the largest difference, as a share of the largest answer."""
    silent, narrowed = copy.deepcopy(module), copy.deepcopy(module)
    mask(silent, cuts)
    narrow(narrowed, cuts)
    with torch.no_grad():
        expected, found = call(silent, batch), call(narrowed, batch)
    error = 0.0
    for name, answer in expected.items():
        gap = distance(answer, found[name])
        error = max(error, math.inf if math.isnan(gap) else gap)
    return narrowed, error


def chosen(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns names it."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def check(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise RecipeError for a pattern that names none."""
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise RecipeError(f"whole: no group of channels begins at {pattern!r}. {did_you_mean(pattern, names)}")


def running(module: nn.Module, batch: Mapping[str, Tensor]) -> list[str]:
    """The paths of the layers with weights, in the order in which they run."""
    order: dict[str, None] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, __, path=path: order.setdefault(path))
        for path, layer in module.named_modules()
        if path and not list(layer.children()) and list(layer.parameters())
    ]
    try:
        with torch.no_grad():
            call(module, batch)
    finally:
        for handle in handles:
            handle.remove()
    return list(order)


@torch.no_grad()
def reestimated(module: nn.Module, task: Task, dataset: Dataset) -> nn.Module:
    """A copy whose batch normalisations have the statistics of these samples."""
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


def weights(module: nn.Module) -> int:
    """How many numbers a module has learned."""
    return sum(parameter.numel() for parameter in module.parameters())
