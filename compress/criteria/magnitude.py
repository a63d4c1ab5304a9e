"""The size of the weight itself."""

from torch import Tensor

from compress.criteria.criterion import Criterion, Evidence


class Magnitude(Criterion):
    """The square of the weight, so that sums over blocks are squares of their norms (Han et al. 2015)."""

    def scores(self, evidence: Evidence) -> Tensor:
        return evidence.weight.float().square()
