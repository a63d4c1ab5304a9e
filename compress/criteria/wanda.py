"""The weight by the size of what it is multiplied with."""

from typing import ClassVar

from torch import Tensor

from compress.criteria.criterion import Criterion, Evidence, Need, Scope


class Wanda(Criterion):
    """|w| |x|, compared within the weights of one output (Sun et al., A Simple and Effective Pruning Approach for Large
    Language Models, 2024)."""

    needs: ClassVar[frozenset[Need]] = frozenset({"moments"})
    scope: ClassVar[Scope] = "row"

    def scores(self, evidence: Evidence) -> Tensor:
        assert evidence.moments is not None
        return evidence.weight.float().abs() * evidence.moments.norms
