"""Importance by weight magnitude times input norm."""

from typing import ClassVar

from torch import Tensor

from compress.criteria.criterion import Criterion, LayerStatistics, Need, Scope


class Wanda(Criterion):
    """|w| ||x||, compared within the weights of one output (Sun et al., A Simple and Effective Pruning Approach for
    Large Language Models, 2024)."""

    needs: ClassVar[frozenset[Need]] = frozenset({"moments"})
    scope: ClassVar[Scope] = "row"

    def score(self, statistics: LayerStatistics) -> Tensor:
        assert statistics.moments is not None
        return statistics.weight.float().abs() * statistics.moments.norms
