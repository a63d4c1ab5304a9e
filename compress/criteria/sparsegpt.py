"""Importance by the optimal brain surgeon's saliency of the layer's output error."""

from typing import ClassVar

from torch import Tensor

from compress.criteria.criterion import Criterion, LayerStatistics, Need
from compress.statistics.optimal_brain_compression import invert_damped


class SparseGpt(Criterion):
    """w^2 / [H^-1]_jj with H = sum of x xT: the output error without the weight once the other weights of its row
    compensate for it (OBS: Hassibi & Stork, 1993; layer by layer: Frantar & Alistarh, SparseGPT, 2023)."""

    needs: ClassVar[frozenset[Need]] = frozenset({"moments"})

    def score(self, statistics: LayerStatistics) -> Tensor:
        assert statistics.moments is not None
        return statistics.weight.float().square() / invert_damped(statistics.moments.gram).diagonal().float()
