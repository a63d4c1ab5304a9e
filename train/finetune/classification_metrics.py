"""Metrics of classifiers: of one class per sample, or of several. Tested against scikit-learn."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from laconic.arrays import Array, softmax
from laconic.errors import DataError
from laconic.metrics import ranks
from train.finetune.metric import Metric


@dataclass(frozen=True)
class ClassCounts:
    """What a classifier found of each class that is in the labels or in its answers, [classes] int64 each."""

    correct: Array
    predicted: Array
    actual: Array

    @classmethod
    def of(cls, outputs: Array, labels: Array) -> "ClassCounts":
        """Count from scores [samples, classes] and either the classes' numbers [samples] or indicators [samples,
        classes], where a class is predicted if its score is positive. Raises DataError."""
        predicted, actual = indicators(outputs, labels)
        counts = cls((predicted & actual).sum(axis=0), predicted.sum(axis=0), actual.sum(axis=0))
        seen = (counts.predicted + counts.actual) > 0
        return cls(counts.correct[seen], counts.predicted[seen], counts.actual[seen])


def indicators(outputs: Array, labels: Array) -> tuple[Array, Array]:
    """Return whether each class is predicted and whether it is labelled, [samples, classes] bool. Raises DataError."""
    check_classes(outputs, labels)
    if labels.ndim == 2:
        return outputs > 0, labels > 0.5
    classes = np.arange(outputs.shape[1])
    return outputs.argmax(axis=1)[:, None] == classes, labels[:, None] == classes


def check_classes(outputs: Array, labels: Array) -> None:
    """Raise DataError unless these are scores of classes, and numbers of classes or indicators."""
    single = labels.ndim == 1 and labels.dtype.kind in "iu"
    if outputs.ndim != 2 or not (single or labels.shape == outputs.shape):
        raise DataError(
            f"the metric is for classifiers: expected scores [samples, classes] and the number of a class for each, "
            f"got outputs {list(outputs.shape)} and labels {list(labels.shape)}. Choose a metric for numbers, as mse"
        )


def divide(numerators: Array, denominators: Array) -> Array:
    """Divide, with 0 where a denominator is 0."""
    return np.where(denominators > 0, numerators / np.maximum(denominators, 1), 0.0)


class CountMetric(Metric):
    """A metric of the counts of each class."""

    def compute(self, outputs: Array, labels: Array) -> float:
        return float(self.from_counts(ClassCounts.of(outputs, labels)))

    @abstractmethod
    def from_counts(self, counts: ClassCounts) -> float:
        """Compute the figure from the counts of each class."""


class Accuracy(Metric):
    """The share of the samples whose class is found, or all of whose classes are."""

    def compute(self, outputs: Array, labels: Array) -> float:
        predicted, actual = indicators(outputs, labels)
        return float((predicted == actual).all(axis=1).mean())


class BalancedAccuracy(CountMetric):
    """The mean recall over the classes in the labels."""

    def from_counts(self, counts: ClassCounts) -> float:
        there = counts.actual > 0
        return float((counts.correct[there] / counts.actual[there]).mean())


class F1Macro(CountMetric):
    """The mean F1 over the classes."""

    def from_counts(self, counts: ClassCounts) -> float:
        return float(divide(2 * counts.correct, counts.predicted + counts.actual).mean())


class F1Micro(CountMetric):
    """The F1 of all classes together; with one class per sample it is the accuracy."""

    def from_counts(self, counts: ClassCounts) -> float:
        return float(divide(2 * counts.correct.sum(), counts.predicted.sum() + counts.actual.sum()))


class PrecisionMacro(CountMetric):
    """The mean precision over the classes, 0 for one that is never found."""

    def from_counts(self, counts: ClassCounts) -> float:
        return float(divide(counts.correct, counts.predicted).mean())


class RecallMacro(CountMetric):
    """The mean recall over the classes, 0 for one that is never wanted."""

    def from_counts(self, counts: ClassCounts) -> float:
        return float(divide(counts.correct, counts.actual).mean())


class Matthews(Metric):
    """Matthews' correlation of found and wanted classes, of one class per sample (Gorodkin, 2004); 0 where either is
    constant."""

    def compute(self, outputs: Array, labels: Array) -> float:
        predicted, actual = (indicator.astype(np.float64) for indicator in indicators(outputs, labels))
        predicted, actual = predicted - predicted.mean(axis=0), actual - actual.mean(axis=0)
        norm = float(np.sqrt((predicted**2).sum() * (actual**2).sum()))
        return float((predicted * actual).sum()) / norm if norm else 0.0


class Auc(Metric):
    """The area under the ROC curve; of more than two classes the mean of each against all others.

    Raises DataError where a class has all samples or none, so that it has no curve.
    """

    def compute(self, outputs: Array, labels: Array) -> float:
        _, actual = indicators(outputs, labels)
        scores = outputs if labels.ndim == 2 else softmax(outputs)
        classes = [1] if labels.ndim == 1 and outputs.shape[1] == 2 else range(outputs.shape[1])
        return float(np.mean([area_under_roc(scores[:, number], actual[:, number]) for number in classes]))


def area_under_roc(scores: Array, actual: Array) -> float:
    """Return the probability that a labelled sample scores higher than another. scores: [samples]. wanted: [samples]
    bool."""
    positives, negatives = int(actual.sum()), int((~actual).sum())
    if not positives or not negatives:
        raise DataError("auc: a class has all samples of the validation set or none. Give --evaluate a file with both")
    return float((ranks(scores)[actual].sum() - positives * (positives - 1) / 2) / (positives * negatives))
