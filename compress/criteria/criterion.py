"""The interface of importance criteria, and the calibration statistics that they score weights by."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor, nn

from compress.statistics.gradients import collect_gradients
from compress.statistics.layer_weights import weight_matrix
from compress.statistics.moments import Moments, collect_moments
from laconic.config import NamedSettings
from laconic.data.dataset import Dataset
from laconic.errors import RecipeError
from laconic.tasks.task import Task

Need = Literal["moments", "gradient"]
Scope = Literal["global", "layer", "row"]
"""What a weight's score is compared with: those of all layers, of its layer, or of its output (row)."""


@dataclass(frozen=True)
class LayerStatistics:
    """What a criterion may use of one layer; None for what it does not need.

    weight: [out, in]. moments: of the layer's inputs. gradient: the mean over samples of |g|, g being the gradient of a
    loss with respect to the weight, [out, in] float32. squared_gradient: the mean of g^2, of the same shape.
    """

    weight: Tensor
    moments: Moments | None = None
    gradient: Tensor | None = None
    squared_gradient: Tensor | None = None


class Criterion(BaseModel, ABC):
    """Scores the importance of each weight. A row, column or block that is pruned as a whole has the sum of its
    scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    needs: ClassVar[frozenset[Need]] = frozenset()
    scope: ClassVar[Scope] = "layer"
    """The default scope in which single weights are compared."""

    @abstractmethod
    def score(self, statistics: LayerStatistics) -> Tensor:
        """Return the importance of each weight, [out, in] float32, not negative: the higher, the more the output would
        change without the weight."""


def collect_statistics(
    criterion: Criterion, module: nn.Module, task: Task, dataset: Dataset, paths: Sequence[str], *, seed: int = 0
) -> dict[str, LayerStatistics]:
    """Return what the criterion needs of the layers at these paths, by path, measured on the dataset with the module as
    it is.

    Layers that no sample runs through are left out if the criterion needs moments.
    """
    moments = collect_moments(module, task, dataset, paths) if "moments" in criterion.needs else {}
    gradients = collect_gradients(module, task, dataset, paths, seed=seed) if "gradient" in criterion.needs else {}
    statistics = {}
    for path in paths:
        if "moments" in criterion.needs and path not in moments:
            continue
        gradient = gradients.get(path)
        statistics[path] = LayerStatistics(
            weight=weight_matrix(module.get_submodule(path)).detach(),
            moments=moments.get(path),
            gradient=gradient.absolute if gradient else None,
            squared_gradient=gradient.square if gradient else None,
        )
    return statistics


class NamedCriterion(NamedSettings):
    """The name of a criterion, with its settings, which are checked when the recipe is read."""

    @model_validator(mode="after")
    def _known_criterion(self) -> Self:
        try:
            self.make_criterion()
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return self

    def make_criterion(self) -> Criterion:
        """Make the criterion with these settings. Raises RecipeError, UntrustedCode, MissingPackage."""
        criterion: Criterion = self.configure("criterion", Criterion)
        return criterion
