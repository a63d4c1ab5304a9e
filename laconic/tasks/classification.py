"""What all classifiers share: labels, probabilities, accuracy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from laconic.errors import DataError
from laconic.metrics import Scorer, make_mean_scorer, overlap, softmax
from laconic.tasks.task import LABELS, Tolerance, first, read_asset, to_json
from laconic.tensor import Array, Arrays

SHOWN = 5
"""How many of the likeliest classes an answer names."""


class Classification:
    """The classifier's half of a task: logits [samples, classes] to answers and figures.

    Fidelity is the overlap of the two probability distributions: 1 minus their total variation distance.
    """

    tolerance = Tolerance(mean=0.98)
    metric: ClassVar[str] = "accuracy"
    answer: ClassVar[str] = "label"
    """What an answer calls the class that it names."""
    labels: tuple[str, ...]

    def label_assets(self) -> dict[str, bytes]:
        """The names of the classes, as a file of the artifact."""
        return {LABELS: to_json(list(self.labels))}

    @staticmethod
    def read_labels(folder: Path) -> tuple[str, ...]:
        """The names of the classes, from the artifact."""
        return tuple(str(label) for label in read_asset(folder, LABELS))

    def parse_label(self, value: Any) -> Any:
        return self.index(value)

    def decode(self, outputs: Arrays) -> list[Any]:
        answers = []
        for row in softmax(first(outputs)):
            best = np.argsort(-row, kind="stable")[:SHOWN]
            scores = [{self.answer: self.label(index), "score": float(row[index])} for index in best]
            answers.append({**scores[0], "scores": scores})
        return answers

    def label(self, index: int) -> str:
        """The name of a class, or its number where it has no name."""
        return self.labels[index] if index < len(self.labels) else str(index)

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        return overlap(first(reference), first(candidate))

    def figures(self, reference: Arrays, candidate: Arrays) -> dict[str, float]:
        a, b = first(reference), first(candidate)
        return {"agreement": float((a.argmax(-1) == b.argmax(-1)).mean())}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        chosen = first(outputs).argmax(axis=-1)
        return make_mean_scorer((chosen == np.array([self.index(label) for label in labels])).astype(np.float64))

    def index(self, label: Any) -> int:
        """The number of a class given by its name or its number. Raises DataError."""
        whole = isinstance(label, (int, np.integer)) and not isinstance(label, bool)
        # A whole number is a number even where a class is named "1".
        if not whole and str(label) in self.labels:
            return self.labels.index(str(label))
        number = int(label) if whole or str(label).isdecimal() else -1
        if number < 0 or (self.labels and number >= len(self.labels)):
            raise DataError(f"label {label!r} is none of the model's classes: {', '.join(self.labels[:20])}")
        return number
