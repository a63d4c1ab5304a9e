"""The base of the stages that make single weights zero."""

import copy
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from compress.criteria.criterion import Criterion, NamedCriterion
from compress.criteria.sparsegpt import SparseGpt
from compress.prune.sparsity import LayerSelection, needs_inputs, select_layers, skip_idle_layers
from laconic.artifacts.record import Record
from laconic.data.dataset import Dataset
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import Property, TorchContext, TorchStage


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
