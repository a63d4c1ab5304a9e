"""Multi-label classification: a text to each of several classes, or to none."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from laconic.arrays import Array, Arrays, first, sigmoid
from laconic.errors import DataError
from laconic.metrics import Scorer, make_f1_scorer
from laconic.tasks.agreement import Agreement, compare_class, share_of
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.classes import LabelledText, are_known, check_names, class_names, find_class
from laconic.tasks.null_answers import SURE, shuffle_rows
from laconic.tasks.tolerance import Tolerance

THRESHOLD = 0.5
"""The least probability of a class that a text is said to be of."""


class MultiLabelClassification(LabelledText):
    """Fidelity is 1 minus the largest change of a class's probability. The metric is micro-averaged F1."""

    name = "multi-label-classification"
    tolerance = Tolerance(mean=0.98)
    metric = "micro F1"
    objective = "binary-cross-entropy"
    has_logits = False
    auto_class = "AutoModelForSequenceClassification"
    architectures = ("ForSequenceClassification",)
    problem_type = "multi_label_classification"

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        return config.get("problem_type") == cls.problem_type

    @classmethod
    def new_classes(cls, labels: Sequence[Any], known: Sequence[str]) -> tuple[str, ...]:
        names = [name for label in labels for name in as_list(label)]
        check_names(names)
        return () if are_known(names, known) else class_names(set(names))

    def parse_label(self, value: Any, sample: Any) -> Any:
        """Return 1.0 for each class of the sample, 0.0 for the others. value: names or numbers of classes."""
        chosen = {find_class(label, self.labels) for label in as_list(value)}
        return [float(index in chosen) for index in range(len(self.labels) or max(chosen, default=0) + 1)]

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        answers = []
        for row in sigmoid(first(outputs).astype(np.float64)):
            order = np.argsort(-row, kind="stable")
            chosen = [self.label(index) for index in order if row[index] >= THRESHOLD]
            scores = [{"label": self.label(index), "score": float(row[index])} for index in order]
            answers.append({"labels": chosen, "scores": scores})
        return answers

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        expected, actual = (sigmoid(first(each).astype(np.float64)) for each in (reference, candidate))
        return np.asarray(1 - np.abs(actual - expected).max(axis=-1))

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        expected, answered = first(reference) >= 0, first(candidate) >= 0
        yield share_of(int((expected == answered).all(axis=-1).sum()), len(expected), "agreement", 0.0)
        for index in range(expected.shape[1]):
            # A class that nearly all samples are of says as much by the samples that are not.
            rare = expected[:, index].mean() <= 0.5
            subject = f"{'label' if rare else 'absence of label'} {self.label(index)!r}"
            yield from compare_class(expected[:, index] == rare, answered[:, index] == rare, subject)

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        (name, logits), *_ = reference.items()
        usual = np.where((logits >= 0).mean(axis=0) > THRESHOLD, SURE, -SURE)
        mean = sigmoid(logits.astype(np.float64)).mean(axis=0).clip(1e-12, 1 - 1e-12)
        answers = {"constant": np.log(mean / (1 - mean)), "majority": usual}
        repeated = {each: {name: np.broadcast_to(row, logits.shape)} for each, row in answers.items()}
        return {"shuffled": shuffle_rows({name: logits}), **repeated}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        predicted, expected = first(outputs) >= 0, np.asarray(labels) > THRESHOLD
        if predicted.shape != expected.shape:
            raise DataError(f"labels are of {expected.shape[1]} classes, and the model has {predicted.shape[1]}")
        return make_f1_scorer((predicted & expected).sum(axis=1), predicted.sum(axis=1), expected.sum(axis=1))


def as_list(value: Any) -> list[Any]:
    """Return the classes of a label: a list as it is, a single name or number as one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]
