"""How much each weight of a layer matters."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from compress.statistics.gradients import gradients
from compress.statistics.gram import Moments, matrix, moments
from laconic.data.dataset import Dataset
from laconic.tasks.task import Task

Need = Literal["moments", "gradient"]
Scope = Literal["global", "layer", "row"]
"""What weights are compared with: those of all layers, of their layer, or of their output's row."""


@dataclass(frozen=True)
class Evidence:
    """What a criterion may look at, for one layer; None where it does not need it.

    weight: [out, in]. moments: of the layer's inputs. gradient: of an objective by the weight, the mean over samples of
    its size |g|, [out, in] float32; squared: the mean of its squares.
    """

    weight: Tensor
    moments: Moments | None = None
    gradient: Tensor | None = None
    squared: Tensor | None = None


class Criterion(BaseModel, ABC):
    """Gives each weight a score. A row, a column or a block of weights that is cut as one counts the sum of theirs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    needs: ClassVar[frozenset[Need]] = frozenset()
    scope: ClassVar[Scope] = "layer"
    """What single weights are compared with, where nobody says otherwise."""

    @abstractmethod
    def scores(self, evidence: Evidence) -> Tensor:
        """[out, in] float32; the greater, the more the answers would suffer without the weight. Not negative."""


def gather(
    criterion: Criterion, module: nn.Module, task: Task, dataset: Dataset, paths: Sequence[str], *, seed: int = 0
) -> dict[str, Evidence]:
    """What the criterion needs of the layers at these paths, by path: the module as it is, asked about the dataset.

    A layer that does not run with any sample has no evidence, where the criterion needs moments.
    """
    flows = moments(module, task, dataset, paths) if "moments" in criterion.needs else {}
    slopes = gradients(module, task, dataset, paths, seed=seed) if "gradient" in criterion.needs else {}
    found = {}
    for path in paths:
        if "moments" in criterion.needs and path not in flows:
            continue
        slope = slopes.get(path)
        found[path] = Evidence(
            weight=matrix(module.get_submodule(path)).detach(),
            moments=flows.get(path),
            gradient=slope.size if slope else None,
            squared=slope.square if slope else None,
        )
    return found
