"""Importance by the second-order Taylor term of the loss, with the diagonal Fisher information as the Hessian."""

from typing import ClassVar

from torch import Tensor

from compress.criteria.criterion import Criterion, LayerStatistics, Need


class Fisher(Criterion):
    """E[g^2] w^2 / 2 (Theis et al., Faster gaze prediction with dense networks and Fisher pruning, 2018; for blocks of
    weights: Kurtic et al., The Optimal BERT Surgeon, 2022).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"gradient"})

    def score(self, statistics: LayerStatistics) -> Tensor:
        assert statistics.squared_gradient is not None
        return statistics.weight.float().square() * statistics.squared_gradient / 2
