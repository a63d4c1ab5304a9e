"""What the weight adds to the layer's output."""

from typing import ClassVar

from torch import Tensor

from compress.criteria.criterion import Criterion, Evidence, Need


class Activation(Criterion):
    """The energy of weight times input over the calibration samples: w^2 |x|^2."""

    needs: ClassVar[frozenset[Need]] = frozenset({"moments"})

    def scores(self, evidence: Evidence) -> Tensor:
        assert evidence.moments is not None
        return evidence.weight.float().square() * evidence.moments.norms.square()
