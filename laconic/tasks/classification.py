"""The common part of all classifiers: labels, probabilities, accuracy."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from laconic.arrays import Array, Arrays, first, softmax
from laconic.metrics import Scorer, make_mean_scorer, overlap
from laconic.tasks.agreement import Agreement, compare_classes
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.checkpoint_loading import count_outputs
from laconic.tasks.classes import are_known, check_names, class_names, find_class
from laconic.tasks.null_answers import make_null_logits, shuffle_rows
from laconic.tasks.task import Task
from laconic.tasks.tolerance import Tolerance
from laconic.tasks.training_needs import HealingLoss

SHOWN = 5
"""How many classes an answer lists, the most probable first."""

PROBABILITIES = 0.3
"""The weight of the probabilities beside the hidden states in healing. With a weight of 1 the hidden states, which say
more about each layer, count for too little. A MiniLM that tells 20 packages apart, with half of its heads and
feed-forward units, after 600 steps: a divergence from the original of 0.057 with this weight, and of 0.064 with a
weight of 1; after 300 of them 0.089, 0.097, and 0.124 with 3 and no temperature."""


class Classification(Task):
    """Mixin of classifiers: logits [samples, classes] to answers and figures.

    Fidelity is the overlap of the two probability distributions: 1 minus their total variation distance.
    """

    tolerance = Tolerance(mean=0.98)
    metric: ClassVar[str] = "accuracy"
    objective: ClassVar[str] = "cross-entropy"
    unlabelled_gradient: ClassVar[Literal["likelihood", "answer"]] = "likelihood"
    problem_type: ClassVar[str | None] = "single_label_classification"
    answer: ClassVar[str] = "label"
    """The key of the class in an answer."""

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        return count_outputs(config) > 1 and config.get("problem_type") in (None, cls.problem_type)

    @classmethod
    def new_classes(cls, labels: Sequence[Any], known: Sequence[str]) -> tuple[str, ...]:
        check_names(labels)
        names = set(labels)
        return () if are_known(names, known) else class_names(names)

    def parse_label(self, value: Any, sample: Any) -> Any:
        return self.index(value)

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        answers = []
        for row in softmax(first(outputs)):
            best = np.argsort(-row, kind="stable")[:SHOWN]
            scores = [{self.answer: self.label(index), "score": float(row[index])} for index in best]
            answers.append({**scores[0], "scores": scores})
        return answers

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        return overlap(first(reference), first(candidate))

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterable[Agreement]:
        return compare_classes(first(reference).argmax(-1), first(candidate).argmax(-1), self.name_class)

    def name_class(self, index: int) -> str:
        """Return the words for a class in a verdict."""
        return f"{self.answer} {self.label(index)!r}"

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        (name, logits), *_ = reference.items()
        shuffled = shuffle_rows({name: logits})
        return {"shuffled": shuffled} | {each: {name: row} for each, row in make_null_logits(logits).items()}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        chosen = first(outputs).argmax(axis=-1)
        return make_mean_scorer((chosen == np.array(labels)).astype(np.float64))

    def index(self, label: Any) -> int:
        """Return the number of a class given by its name or its number. Raises DataError."""
        return find_class(label, self.labels)

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """Compare all hidden states and the probabilities; the probabilities alone where no layers are shared."""
        return {"hidden-states": 1.0, "probabilities": PROBABILITIES} if layers else {"probabilities": 1.0}
