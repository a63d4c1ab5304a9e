"""The class of each pixel of an image."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from laconic.errors import DataError
from laconic.tasks.semantic_segmentation import IGNORED
from train.step.objective import TARGETS, Batch, Objective, first_output, to_tensors


class PixelCrossEntropy(Objective):
    """Cross-entropy of the logits [rows, classes, height, width], interpolated to the size of the input; a term for
    each pixel that has a class."""

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError(
                "the images have no labels to learn from. Give each row the path of a map of classes, 'label'"
            )
        return to_tensors(self.task.encode(samples) | {TARGETS: np.stack(labels)})

    def count_terms(self, batch: Batch) -> int:
        return int((batch[TARGETS] != IGNORED).sum())

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        targets = batch[TARGETS]
        logits = interpolate(first_output(module, batch).float(), targets.shape[1:], mode="bilinear")
        return cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    def make_example(self, rows: int, length: int) -> Batch:
        batch = to_tensors(self.task.typical(rows, length))
        (pixels,) = batch.values()
        return batch | {TARGETS: torch.zeros(rows, *pixels.shape[2:], dtype=torch.int64)}
