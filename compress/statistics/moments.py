"""First and second moments of layer inputs, on which pruning, factorization and rounding base most decisions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.statistics.layer_inputs import ROWS, forward_batches, iterate_inputs
from laconic.data.dataset import Dataset
from laconic.tasks.task import Task


@dataclass
class Moments:
    """Sums over the inputs x of a layer, each [in].

    gram: the sum of x xT, [in, in] float32. total: the sum of x, [in] float32. count: the number of inputs.
    """

    gram: Tensor
    total: Tensor
    count: int

    @classmethod
    def zeros(cls, like: Tensor, width: int) -> "Moments":
        """No inputs so far of this width, on the device and in the dtype of a tensor."""
        return cls(like.new_zeros(width, width), like.new_zeros(width), 0)

    def add(self, x: Tensor) -> None:
        """Count these inputs, [count, in]."""
        self.gram.addmm_(x.T, x)
        self.total += x.sum(dim=0)
        self.count += len(x)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.gram + other.gram, self.total + other.total, self.count + other.count)

    @property
    def norms(self) -> Tensor:
        """The L2 norm of each input feature over all inputs, [in]."""
        return self.gram.diagonal().clamp(min=0).sqrt()

    def centred(self) -> Tensor:
        """The sum of (x - mean) (x - mean)T, [in, in] float64."""
        count = max(self.count, 1)
        mean = self.total.double() / count
        return self.gram.double() - count * torch.outer(mean, mean)


def collect_moments(
    module: nn.Module, task: Task, dataset: Dataset, paths: Sequence[str], *, rows: int = ROWS
) -> dict[str, Moments]:
    """The input moments of the linear or convolutional layers at these paths over a dataset, by path.

    Padding tokens (by the attention mask of the samples) are not counted. The inputs of a convolution are its patches,
    [channels of a group x kernel], of all groups together. Memory: one [in, in] matrix a layer.
    """
    found: dict[str, Moments] = {}
    with torch.inference_mode():
        for path, inputs in iterate_inputs(module, forward_batches(task, dataset, rows), paths):
            add_inputs(found, path, inputs)
    return found


def add_inputs(found: dict[str, Moments], path: str, inputs: Tensor) -> None:
    """Count inputs [count, in] of the layer at this path."""
    if path not in found:
        found[path] = Moments.zeros(inputs, inputs.shape[1])
    found[path].add(inputs)
