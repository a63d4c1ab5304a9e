"""What all stages that put zeros into weights have in common."""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from compress.criteria.criterion import Criterion
from compress.criteria.sparsegpt import SparseGpt
from compress.prune.layer_selection import Chosen, choose
from compress.prune.sparsity import counted, running, watches
from laconic.artifacts.record import Record
from laconic.config import NamedSettings
from laconic.data.dataset import Dataset
from laconic.errors import RecipeError
from laconic.hashing import code_version, hash_of
from laconic.recipes.stage import Property, TorchContext, TorchStage

if TYPE_CHECKING:
    from torch import nn

    from laconic.models.checkpoint import Checkpoint


class Zeros(TorchStage):
    """Takes single weights out of linear and convolutional layers; the layers keep their sizes.

    criterion: what tells how much a weight matters. update: whether the other weights of a layer make up for each that
    goes, as SparseGPT has it; by default with its own criterion alone. layers: paths or patterns of those that get
    zeros; keep: of those that do not, whatever `layers` says. samples: how many to look at.
    """

    makes: ClassVar[frozenset[Property]] = frozenset({"zeros"})
    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    lossy = True

    criterion: NamedSettings = NamedSettings(name="sparsegpt")
    update: Literal["none", "sparsegpt"] | None = None
    layers: tuple[str, ...] = ("*",)
    keep: tuple[str, ...] = ()
    samples: int = Field(default=128, ge=1)

    @field_validator("criterion")
    @classmethod
    def _known_criterion(cls, criterion: NamedSettings) -> NamedSettings:
        try:
            criterion.configure("criterion", Criterion)
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return criterion

    @property
    def measure(self) -> Criterion:
        """The criterion, with its settings."""
        found: Criterion = self.criterion.configure("criterion", Criterion)
        return found

    @property
    def updates(self) -> bool:
        """Whether the other weights make up for those that go."""
        return isinstance(self.measure, SparseGpt) if self.update is None else self.update == "sparsegpt"

    def begin(self, checkpoint: "Checkpoint", context: TorchContext) -> tuple["Checkpoint", Dataset, Chosen]:
        """A copy of the checkpoint to be changed, the samples to look at, and the layers. Raises RecipeError."""
        own = replace(checkpoint, module=copy.deepcopy(checkpoint.module))
        dataset = context.calibrate.take(self.samples, context.seed)
        chosen = choose(own.module, self.layers, self.keep)
        if watches(self.measure, update=self.updates):
            chosen = running(own.module, context.task, dataset, chosen)
        return own, dataset, chosen

    def record(
        self, name: str, checkpoint: "Checkpoint", module: "nn.Module", chosen: Chosen, context: TorchContext
    ) -> Record:
        """The step of the history that made of this checkpoint the module as it is now."""
        config = self.model_dump(mode="json")
        figures, structure = counted(module, chosen)
        data = (context.calibrate.fingerprint, context.train.fingerprint)
        key = hash_of(context.key, checkpoint.key, name, config, code_version(), data, context.seed)
        return Record(stage=name, config=config, key=key, figures=figures, structure=structure)

    @staticmethod
    def rebuild(module: "nn.Module", record: Record) -> None:
        """Nothing: zeros are weights like others, and change no structure."""
