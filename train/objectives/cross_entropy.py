"""One of several classes, of a text or of an image."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laconic.errors import DataError
from train.step.objective import TARGETS, Batch, Objective, first_output, to_tensors


class CrossEntropy(Objective):
    """Cross-entropy of the logits [rows, classes]; a term per row. Labels are numbers of classes.

    Label smoothing gives a share of each label to all classes alike (Szegedy et al., arXiv 1512.00567). With class
    weights, the loss of a row is multiplied by the weight of its class, and the mean is still over rows.
    """

    class_weights: Sequence[float] | None = None
    label_smoothing = 0.0

    def weigh(self, class_weights: Sequence[float] | None, label_smoothing: float) -> None:
        self.class_weights, self.label_smoothing = class_weights, label_smoothing

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError(
                "the samples have no labels, and a classifier learns from nothing else. Give each row a 'label', or "
                "put the images into a folder per class"
            )
        return to_tensors(self.task.encode(samples)) | {TARGETS: torch.tensor(list(labels), dtype=torch.int64)}

    def count_terms(self, batch: Batch) -> int:
        return batch[TARGETS].shape[0]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        logits = first_output(module, batch).float()
        weights = None if self.class_weights is None else logits.new_tensor(self.class_weights)
        return cross_entropy(logits, batch[TARGETS], weights, reduction="sum", label_smoothing=self.label_smoothing)

    def make_example(self, rows: int, length: int) -> Batch:
        targets = torch.zeros(rows, dtype=torch.int64)
        return to_tensors(self.task.typical(rows, length)) | {TARGETS: targets}
