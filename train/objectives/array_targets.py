"""Classes or numbers, for a module that no other task fits; and probabilities, of several classes or of relevance."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from laconic.data.dataset import Dataset
from laconic.errors import DataError
from laconic.tasks.task import Task
from train.step.objective import TARGETS, Batch, Objective, first_output, to_tensors


class Targets(Objective):
    """Of a module's first output: cross-entropy of [rows, classes] where labels are whole numbers, the squared error,
    the mean over a row's numbers, where they are anything else. A term per row.

    like: a label, to make examples by; the number of a class where none is at hand.
    """

    def __init__(self, task: Task, like: Any = 0) -> None:
        super().__init__(task)
        self.like = like

    @classmethod
    def of(cls, task: Task, dataset: Dataset | None = None) -> Objective:
        return cls(task, dataset.labels[0]) if dataset is not None and dataset.labels else cls(task)

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError(
                "the samples have no labels to learn from. Give each row a 'label', or the file an array 'label'"
            )
        targets = to_targets(labels)
        if not targets.is_floating_point() and int(targets.min()) < 0:
            raise DataError(
                f"label {int(targets.min())} is no class; the first is 0. Numbers to be reached are given as floats"
            )
        return to_tensors(self.task.encode(samples)) | {TARGETS: targets}

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        output, targets = first_output(module, batch).float(), batch[TARGETS]
        if not targets.is_floating_point():
            if output.ndim != 2 or targets.ndim != 1:
                raise DataError(
                    f"labels that are whole numbers are classes, one per row, for an answer [rows, classes]; the "
                    f"labels are {list(targets.shape)}, the answer {list(output.shape)}. Numbers "
                    f"to be reached are given as floats"
                )
            return cross_entropy(output, targets, reduction="sum")
        rows = targets.shape[0]
        if output.numel() != targets.numel():
            raise DataError(
                f"a label holds {targets.numel() // rows} numbers, an answer {output.numel() // rows}. Give one number "
                f"for each of the answer's"
            )
        return (output.reshape(rows, -1) - targets.reshape(rows, -1)).square().mean(dim=1).sum()

    def make_example(self, rows: int, length: int) -> Batch:
        return to_tensors(self.task.typical(rows, length)) | {TARGETS: to_targets([np.zeros_like(self.like)] * rows)}


class BinaryCrossEntropy(Targets):
    """Binary cross-entropy of the logits [rows, outputs], the mean over a row's outputs; a term per row. Labels are
    numbers from 0 to 1, one for each output."""

    def __init__(self, task: Task, like: Any = None) -> None:
        super().__init__(task, [0.0] * max(1, len(task.labels)) if like is None else like)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        output, targets = first_output(module, batch).float(), batch[TARGETS].to(torch.float32)
        if output.shape != targets.shape:
            raise DataError(f"labels have the shape {list(targets.shape)}, and the answers {list(output.shape)}")
        return binary_cross_entropy_with_logits(output, targets, reduction="none").mean(dim=1).sum()


def to_targets(labels: Sequence[Any]) -> Tensor:
    """Convert labels to int64 where all are whole numbers, else to float32."""
    array = np.asarray(labels)
    return torch.tensor(array.astype(np.int64 if array.dtype.kind in "iu" else np.float32))
