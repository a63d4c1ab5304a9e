"""What an objective would change by, to the first order, without the weight."""

from typing import ClassVar, Literal

from torch import Tensor

from compress.criteria.criterion import Criterion, Evidence, Need


class Taylor(Criterion):
    """|g w|, the mean over samples (Molchanov et al., Importance Estimation for Neural Network Pruning, 2019).

    power: 1, or 2 for (g w)^2, which is what Fisher counts.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"gradient"})

    power: Literal[1, 2] = 1

    def scores(self, evidence: Evidence) -> Tensor:
        assert evidence.gradient is not None
        assert evidence.squared is not None
        if self.power == 2:
            return evidence.weight.float().square() * evidence.squared
        return evidence.weight.float().abs() * evidence.gradient
