"""Which positions of the rows of a batch a process computes the losses of."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from train.step.objective import Batch


class AllPositions:
    """All positions, where no other process has some."""

    def select(self, batch: Batch) -> AbstractContextManager[Batch]:
        """Enter a context for the forward pass, with the tensors of the positions."""
        return nullcontext(batch)

    def sum(self, loss: Tensor) -> Tensor:
        """Return the loss of all positions, [] float32 without a gradient, from that of these."""
        return loss
