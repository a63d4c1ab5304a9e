"""Metrics of numbers, and of scored pairs, whose output is each pair's cosine. Tested against scikit-learn, scipy."""

from typing import ClassVar

import numpy as np

from laconic.arrays import Array
from laconic.errors import DataError
from laconic.metrics import spearman
from train.finetune.metric import Metric


def flatten_alike(outputs: Array, labels: Array) -> tuple[Array, Array]:
    """Flatten outputs and labels to float64 vectors. Raises DataError unless there are as many of both."""
    if outputs.size != labels.size:
        raise DataError(
            f"the metric compares numbers: expected as many in an output as in a label, got outputs "
            f"{list(outputs.shape)} and labels {list(labels.shape)}. Choose a metric for classes, as f1-macro"
        )
    return outputs.reshape(-1).astype(np.float64), labels.reshape(-1).astype(np.float64)


class Mse(Metric):
    """The mean squared error."""

    higher_is_better: ClassVar[bool] = False

    def compute(self, outputs: Array, labels: Array) -> float:
        outputs, labels = flatten_alike(outputs, labels)
        return float(((outputs - labels) ** 2).mean())


class Mae(Metric):
    """The mean absolute error."""

    higher_is_better: ClassVar[bool] = False

    def compute(self, outputs: Array, labels: Array) -> float:
        outputs, labels = flatten_alike(outputs, labels)
        return float(np.abs(outputs - labels).mean())


class R2(Metric):
    """The coefficient of determination; 0 where the labels are constant."""

    def compute(self, outputs: Array, labels: Array) -> float:
        outputs, labels = flatten_alike(outputs, labels)
        spread = float(((labels - labels.mean()) ** 2).sum())
        return 1 - float(((outputs - labels) ** 2).sum()) / spread if spread else 0.0


class Pearson(Metric):
    """Pearson's correlation; 0 where either is constant."""

    def compute(self, outputs: Array, labels: Array) -> float:
        outputs, labels = (values - values.mean() for values in flatten_alike(outputs, labels))
        norm = float(np.sqrt((outputs @ outputs) * (labels @ labels)))
        return float(outputs @ labels) / norm if norm else 0.0


class Spearman(Metric):
    """Spearman's rank correlation."""

    def compute(self, outputs: Array, labels: Array) -> float:
        return spearman(*flatten_alike(outputs, labels))
