"""How much each weight of a layer matters."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from compress.gram import Moments

Need = Literal["moments", "gradient"]


@dataclass(frozen=True)
class Evidence:
    """What a criterion may look at, for one layer; None where it does not need it.

    weight: [out, in]. moments: of the layer's inputs. gradient: of an objective by the weight, the mean over samples,
    [out, in]; squared: the mean of its squares.
    """

    weight: Tensor
    moments: Moments | None = None
    gradient: Tensor | None = None
    squared: Tensor | None = None


class Criterion(BaseModel, ABC):
    """Gives each weight a score. A row, a column or a block of weights that is cut as one counts the sum of theirs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    needs: ClassVar[frozenset[Need]] = frozenset()

    @abstractmethod
    def scores(self, evidence: Evidence) -> Tensor:
        """[out, in] float32; the greater, the more the answers would suffer without the weight. Not negative."""
