"""One of several classes: of a text or of an image, of each token, or of each pixel."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from laconic.errors import DataError
from laconic.tasks.semantic_segmentation import IGNORED as VOID
from laconic.tasks.token_positions import IGNORED
from train.step.objective import TARGETS, Batch, Objective, first_output, to_tensors


class CrossEntropy(Objective):
    """Cross-entropy of the logits [rows, classes]; a term per row. Labels are numbers of classes.

    Label smoothing gives a share of each label to all classes alike (Szegedy et al., arXiv 1512.00567). With class
    weights, the loss of a row is multiplied by the weight of its class, and the mean is still over rows.
    """

    class_weights: Sequence[float] | None = None
    label_smoothing = 0.0

    def set_class_weights(self, class_weights: Sequence[float] | None, label_smoothing: float) -> None:
        self.class_weights, self.label_smoothing = class_weights, label_smoothing

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError(
                "the samples have no labels, and a classifier learns from nothing else. Give each row a 'label', or "
                "put the images into a folder per class"
            )
        return to_tensors(self.task.encode(samples)) | {TARGETS: torch.tensor(list(labels), dtype=torch.int64)}

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        logits = first_output(module, batch).float()
        weights = None if self.class_weights is None else logits.new_tensor(self.class_weights)
        return cross_entropy(logits, batch[TARGETS], weights, reduction="sum", label_smoothing=self.label_smoothing)

    def make_example(self, rows: int, length: int) -> Batch:
        targets = torch.zeros(rows, dtype=torch.int64)
        return to_tensors(self.task.typical(rows, length)) | {TARGETS: targets}


class TokenCrossEntropy(Objective):
    """Cross-entropy of the logits [rows, positions, classes]; a term for each token that has a class."""

    ignored = IGNORED

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError("the samples have no labels to learn from. Give each row a 'label', or 'tokens' and 'tags'")
        batch = self.task.encode(samples)
        targets = np.full_like(batch["input_ids"], IGNORED)
        for row, label in zip(targets, labels, strict=True):
            classes = label[: len(row)]
            row[: len(classes)] = classes
        return to_tensors(batch | {TARGETS: targets})

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        logits = first_output(module, batch).float().flatten(0, 1)
        return cross_entropy(logits, batch[TARGETS].flatten(), ignore_index=IGNORED, reduction="sum")

    def make_example(self, rows: int, length: int) -> Batch:
        batch = to_tensors(self.task.typical(rows, length))
        return batch | {TARGETS: torch.zeros_like(batch["input_ids"])}


class PixelCrossEntropy(Objective):
    """Cross-entropy of the logits [rows, classes, height, width], at the size of the input; a term for each pixel that
    has a class."""

    ignored = VOID

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError(
                "the images have no labels to learn from. Give each row the path of a map of classes, 'label'"
            )
        return to_tensors(self.task.encode(samples) | {TARGETS: np.stack(labels)})

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        targets = batch[TARGETS]
        logits = interpolate(first_output(module, batch).float(), targets.shape[1:], mode="bilinear")
        return cross_entropy(logits, targets, ignore_index=VOID, reduction="sum")

    def make_example(self, rows: int, length: int) -> Batch:
        batch = to_tensors(self.task.typical(rows, length))
        (pixels,) = batch.values()
        return batch | {TARGETS: torch.zeros(rows, *pixels.shape[2:], dtype=torch.int64)}
