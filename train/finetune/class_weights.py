"""The weights of classes in the loss of a classifier."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from laconic.data.dataset import Dataset
from laconic.errors import DataError, RecipeError
from laconic.tasks.classes import find_class
from laconic.tasks.task import Task


def compute_class_weights(
    setting: Literal["balanced"] | Mapping[str, float] | None, task: Task, dataset: Dataset
) -> list[float] | None:
    """Compute the weight of each class by its number, scaled so that their mean over the rows of the dataset is 1; None
    where none are set.

    setting: "balanced" weighs a class by the inverse of its share of the rows; or weights by class, 1 for one that is
    left out. Raises RecipeError for a class that there is not, and for labels that are no single classes.
    """
    if setting is None:
        return None
    labels = np.asarray(dataset.labels)
    if dataset.labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise RecipeError(
            f"class_weights are for labels that are classes, and {dataset.name} has others. Leave them out"
        )
    count = max(len(task.labels), int(labels.max()) + 1)
    rows = np.bincount(labels, minlength=count)
    if setting == "balanced":
        weights = len(labels) / np.maximum(rows, 1)
    else:
        weights = np.ones(count)
        for label, weight in setting.items():
            try:
                weights[find_class(label, task.labels)] = weight
            except (DataError, IndexError):
                known = ", ".join(task.labels[:20]) or f"0 to {count - 1}"
                raise RecipeError(f"class_weights: {label!r} is none of the classes: {known}") from None
    return [float(weight) for weight in weights / weights[labels].mean()]
