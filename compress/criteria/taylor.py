"""Importance by the first-order Taylor expansion of the loss."""

from typing import ClassVar, Literal

from torch import Tensor

from compress.criteria.criterion import Criterion, LayerStatistics, Need


class Taylor(Criterion):
    """|g w|, the mean over samples (Molchanov et al., Importance Estimation for Neural Network Pruning, 2019).

    power: 1, or 2 for (g w)^2, which is proportional to the Fisher criterion.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"gradient"})

    power: Literal[1, 2] = 1

    def score(self, statistics: LayerStatistics) -> Tensor:
        assert statistics.gradient is not None
        assert statistics.squared_gradient is not None
        if self.power == 2:
            return statistics.weight.float().square() * statistics.squared_gradient
        return statistics.weight.float().abs() * statistics.gradient
