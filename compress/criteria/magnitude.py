"""Importance by the magnitude of the weight."""

from torch import Tensor

from compress.criteria.criterion import Criterion, LayerStatistics


class Magnitude(Criterion):
    """w^2, so that the sum over a block is its squared norm (Han et al., Learning both Weights and Connections for
    Efficient Neural Networks, 2015)."""

    def score(self, statistics: LayerStatistics) -> Tensor:
        return statistics.weight.float().square()
