"""How a training step cooperates with the steps of other devices."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn


class ParallelStrategy:
    """The strategy of a single device, which has nobody to cooperate with.

    Strategies for several devices derive from it (`train.parallel`) and replace it as a whole.
    """

    micro_batches: int = 1
    """How many micro-batches a batch has at least. All ranks take as many, since each is a round of collectives."""

    def reduce_terms(self, terms: int) -> float:
        """Return the divisor of this rank's sum of losses, from the number of loss terms in its part of the batch; 0 on
        all ranks where none has a term."""
        return float(terms)

    def average(self, loss: Tensor) -> Tensor:
        """Average a loss, [] float32, over all ranks."""
        return loss

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        return bool(flag)

    def synchronize_gradients(self, loss_module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Enter a context for the passes of one micro-batch. last: whether it is the batch's last, after which
        gradients are reduced over the ranks."""
        return nullcontext()

    def gather_weights(self) -> AbstractContextManager[Any]:
        """Enter a context in which the model can be called outside a step, by all ranks alike."""
        return nullcontext()
