"""Importance by the energy that a weight adds to the layer's output."""

from typing import ClassVar

from torch import Tensor

from compress.criteria.criterion import Criterion, LayerStatistics, Need


class Activation(Criterion):
    """w^2 ||x||^2, the energy of weight times input over the calibration samples."""

    needs: ClassVar[frozenset[Need]] = frozenset({"moments"})

    def score(self, statistics: LayerStatistics) -> Tensor:
        assert statistics.moments is not None
        return statistics.weight.float().square() * statistics.moments.norms.square()
