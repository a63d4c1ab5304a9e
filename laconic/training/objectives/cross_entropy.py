"""One of several classes, of a text or of an image."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laconic.errors import DataError
from laconic.training.step.objective import TARGETS, Batch, Objective, first_output, to_tensors


class CrossEntropy(Objective):
    """Cross-entropy of the logits [rows, classes]; a term per row. Labels are numbers of classes."""

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
        return cross_entropy(first_output(module, batch).float(), batch[TARGETS], reduction="sum")

    def make_example(self, rows: int, length: int) -> Batch:
        targets = torch.zeros(rows, dtype=torch.int64)
        return to_tensors(self.task.typical(rows, length)) | {TARGETS: targets}
