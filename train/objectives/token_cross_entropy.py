"""The class of each token of a text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laconic.errors import DataError
from laconic.tasks.token_positions import IGNORED
from train.step.objective import TARGETS, Batch, Objective, first_output, to_tensors


class TokenCrossEntropy(Objective):
    """Cross-entropy of the logits [rows, positions, classes]; a term for each token that has a class."""

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError("the samples have no labels to learn from. Give each row a 'label', or 'tokens' and 'tags'")
        batch = self.task.encode(samples)
        targets = np.full_like(batch["input_ids"], IGNORED)
        for row, label in zip(targets, labels, strict=True):
            classes = label[: len(row)]
            row[: len(classes)] = classes
        return to_tensors(batch | {TARGETS: targets})

    def count_terms(self, batch: Batch) -> int:
        return int((batch[TARGETS] != IGNORED).sum())

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        logits = first_output(module, batch).float().flatten(0, 1)
        return cross_entropy(logits, batch[TARGETS].flatten(), ignore_index=IGNORED, reduction="sum")

    def make_example(self, rows: int, length: int) -> Batch:
        batch = to_tensors(self.task.typical(rows, length))
        return batch | {TARGETS: torch.zeros_like(batch["input_ids"])}
