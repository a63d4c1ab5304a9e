"""Each output a probability of its own: of several classes at once, or of relevance."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from laconic.errors import DataError
from laconic.tasks.task import Task
from train.objectives.array_targets import Targets
from train.step.objective import TARGETS, Batch, first_output


class BinaryCrossEntropy(Targets):
    """Binary cross-entropy of the logits [rows, outputs], the mean over a row's outputs; a term per row. Labels are
    numbers from 0 to 1, one for each output."""

    def __init__(self, task: Task, like: Any = None) -> None:
        super().__init__(task, [0.0] * max(1, len(task.labels)) if like is None else like)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        found, targets = first_output(module, batch).float(), batch[TARGETS].to(torch.float32)
        if found.shape != targets.shape:
            raise DataError(f"labels have the shape {list(targets.shape)}, and the answers {list(found.shape)}")
        return binary_cross_entropy_with_logits(found, targets, reduction="none").mean(dim=1).sum()
