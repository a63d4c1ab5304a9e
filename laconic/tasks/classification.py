"""The common part of all classifiers: labels, probabilities, accuracy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import DataError
from laconic.metrics import Scorer, make_mean_scorer, overlap, softmax
from laconic.tasks.task import LABELS, HealingLoss, Tolerance, first, read_asset, to_json

SHOWN = 5
"""How many classes an answer lists, the most probable first."""

PROBABILITIES = 0.3
"""The weight of the probabilities beside the hidden states in healing. With a weight of 1 the hidden states, which say
more about each layer, count for too little. A MiniLM that tells 20 packages apart, with half of its heads and
feed-forward units, after 600 steps: a divergence from the original of 0.057 with this weight, and of 0.064 with a
weight of 1; after 300 of them 0.089, 0.097, and 0.124 with 3 and no temperature."""


class Classification:
    """Mixin of classifiers: logits [samples, classes] to answers and figures.

    Fidelity is the overlap of the two probability distributions: 1 minus their total variation distance.
    """

    tolerance = Tolerance(mean=0.98)
    metric: ClassVar[str] = "accuracy"
    objective: ClassVar[str] = "cross-entropy"
    unlabelled_gradient: ClassVar[Literal["likelihood", "answer"]] = "likelihood"
    answer: ClassVar[str] = "label"
    """The key of the class in an answer."""
    labels: tuple[str, ...]

    def label_assets(self) -> dict[str, bytes]:
        """The artifact file with the names of the classes."""
        return {LABELS: to_json(list(self.labels))}

    @staticmethod
    def read_labels(folder: Path) -> tuple[str, ...]:
        """Read the names of the classes from an artifact. Raises CorruptArtifact."""
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
        return find_class(label, self.labels)

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """All hidden states and the probabilities; the probabilities alone where no layers are shared."""
        return {"hidden-states": 1.0, "probabilities": PROBABILITIES} if layers else {"probabilities": 1.0}


def find_class(label: Any, labels: Sequence[str]) -> int:
    """The number of a class given by its name or its number. labels: the names; empty where any number will do.

    Raises DataError for a label that is no class.
    """
    whole = isinstance(label, (int, np.integer)) and not isinstance(label, bool)
    # A whole number is a number even where a class is named "1".
    if not whole and str(label) in labels:
        return labels.index(str(label))
    number = int(label) if whole or str(label).isdecimal() else -1
    if number < 0 or (labels and number >= len(labels)):
        raise DataError(f"label {label!r} is none of the model's classes: {', '.join(labels[:20])}")
    return number
