"""What an objective would lose, to the second order, without the weight."""

from typing import ClassVar

from torch import Tensor

from compress.criteria.criterion import Criterion, Evidence, Need


class Fisher(Criterion):
    """E[g^2] w^2 / 2: the Hessian's place is taken by the diagonal of the Fisher matrix (Theis et al., Faster gaze
    prediction with dense networks and Fisher pruning, 2018; in blocks: Kurtic et al., The Optimal BERT Surgeon, 2022).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"gradient"})

    def scores(self, evidence: Evidence) -> Tensor:
        assert evidence.squared is not None
        return evidence.weight.float().square() * evidence.squared / 2
