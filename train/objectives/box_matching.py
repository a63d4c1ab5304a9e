"""The objects of an image, matched with what a detector finds."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import is_scipy_available

from laconic.arrays import Array
from laconic.errors import DataError, MissingPackage
from laconic.models.signature import call
from laconic.tasks.image_localization import PIXELS
from train.step.objective import TARGETS, Batch, Objective, to_tensors

NOTHING = -1.0
"""The class of the rows that fill up the targets of an image with fewer objects than another."""
MASK = "pixel_mask"
"""The input that tells which pixels are the image's own, [rows, height, width] int64: 0 for padding."""


class BoxMatching(Objective):
    """The loss of the model's own class in transformers: each object is matched with one query, so that the sum of the
    costs of class and box is the least, and the other queries should find nothing (Carion et al., arXiv 2005.12872)."""

    splittable = False  # the loss is divided by the number of objects in the batch

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError(
                "the images have no labels to learn from. Give each row its objects under 'label', a list of "
                "{'label': ..., 'box': {'xmin': ..., 'ymin': ..., 'xmax': ..., 'ymax': ...}}"
            )
        inputs = self.task.encode(samples)
        (pixels,) = inputs.values()
        mask = np.zeros((len(samples), *pixels.shape[2:]), np.int64)
        for row, sample in zip(mask, samples, strict=True):
            row[: sample[PIXELS].shape[1], : sample[PIXELS].shape[2]] = 1
        return to_tensors(inputs | {MASK: mask, TARGETS: stack_targets(labels)})

    def count_terms(self, batch: Batch) -> int:
        return len(batch[MASK])

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        if TARGETS not in batch:  # where a step is simulated, nothing is known that could be matched
            outputs = call(module, batch).values()
            return torch.stack([output.float().sum() for output in outputs]).sum()
        if not is_scipy_available():
            raise MissingPackage("the loss of detectors matches objects by scipy. Install it: pip install scipy")
        loss: Tensor = call(module, batch)["loss"]
        return loss * self.count_terms(batch)

    def make_example(self, rows: int, length: int) -> Batch:
        batch = to_tensors(self.task.typical(rows, length))
        (pixels,) = batch.values()
        return batch | {MASK: torch.ones(rows, *pixels.shape[2:], dtype=torch.int64)}


def stack_targets(labels: Sequence[Array]) -> Array:
    """Stack labels as `ObjectDetection.parse_label` makes them, filled up to the same number of objects, with boxes by
    centre, width and height: [rows, objects, 5] float32."""
    stacked = np.full((len(labels), max([1, *map(len, labels)]), 5), NOTHING, np.float32)
    for row, label in zip(stacked, labels, strict=True):
        centre, size = (label[:, 1:3] + label[:, 3:]) / 2, label[:, 3:] - label[:, 1:3]
        row[: len(label)] = np.concatenate([label[:, :1], centre, size], axis=1)
    return stacked
