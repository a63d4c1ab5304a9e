"""Text regression: a text to a number, or to several."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

import numpy as np
from tokenizers import Tokenizer

from laconic.arrays import Array, Arrays, first, sigmoid
from laconic.errors import DataError
from laconic.metrics import Scorer, make_r2_scorer, measure_closeness
from laconic.tasks.agreement import Agreement, compare_scores
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.assets import PREPROCESS, read_asset, to_json
from laconic.tasks.checkpoint_loading import count_outputs
from laconic.tasks.classes import LabelledText
from laconic.tasks.preprocessing import Activation, Preprocessing, TextOptions
from laconic.tasks.tolerance import Tolerance
from laconic.tensor import TensorSpec

SCORE_NAME = "score"
"""The name of the output of a new head with one."""


class TextRegression(LabelledText):
    """Text, or a pair of texts, to a score; or to several, which the classes name.

    Fidelity is the closeness to the original's score in standard deviations of the original's scores, 0.995 for a tenth
    of one; with several scores, that of the worst.
    """

    name = "text-regression"
    tolerance = Tolerance(mean=0.99)
    metric = "R2"
    objective = "targets"
    has_logits = False
    auto_class = "AutoModelForSequenceClassification"
    architectures = ("ForSequenceClassification",)
    problem_type: ClassVar[str | None] = "regression"

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        activation: Activation = "identity",
        **options: Unpack[TextOptions],
    ) -> None:
        """activation: what makes a score of an output."""
        super().__init__(tokenizer, inputs, **options)
        self.activation = activation

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        task = super().from_preprocessing(preprocessing)
        task.activation = preprocessing.activation
        return task

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        task = super().from_assets(folder, inputs)
        task.activation = read_asset(folder, PREPROCESS)["activation"]
        return task

    def assets(self) -> dict[str, bytes]:
        preprocess = {"max_tokens": self.max_tokens, "pad_id": self.pad_id, "activation": self.activation}
        return super().assets() | {PREPROCESS: to_json(preprocess)}

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        return config.get("problem_type") == "regression" or count_outputs(config) == 1

    @classmethod
    def new_classes(cls, labels: Sequence[Any], known: Sequence[str]) -> tuple[str, ...]:
        sizes = {len(parse_numbers(label)) for label in labels}
        if len(sizes) != 1:
            raise DataError(f"a label holds {min(sizes)} to {max(sizes)} numbers; expected as many in each row")
        (size,) = sizes
        if size == len(known):
            return ()
        return (SCORE_NAME,) if size == 1 else tuple(map(str, range(size)))

    def parse_label(self, value: Any, sample: Any) -> Any:
        numbers = parse_numbers(value)
        if self.labels and len(numbers) != len(self.labels):
            raise DataError(f"a label holds {len(numbers)} numbers, and the model answers with {len(self.labels)}")
        return numbers

    def scores(self, outputs: Arrays) -> Array:
        """Return the scores, [samples, outputs] float64."""
        logits = first(outputs).astype(np.float64)
        logits = logits.reshape(len(logits), -1)
        return sigmoid(logits) if self.activation == "sigmoid" else logits

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        scores = self.scores(outputs)
        if scores.shape[1] == 1:
            return [{"score": float(row[0])} for row in scores]
        return [
            {"scores": [{"label": self.label(index), "score": float(score)} for index, score in enumerate(row)]}
            for row in scores
        ]

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        return np.asarray(measure_closeness(self.scores(reference), self.scores(candidate)).min(axis=1))

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        expected, actual = self.scores(reference), self.scores(candidate)
        for index, (one, two) in enumerate(zip(expected.T, actual.T, strict=True)):
            yield from compare_scores(one, two, f"score {self.label(index)!r}")

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        """Score by the coefficient of determination, the mean over the outputs; 0 where the labels do not vary."""
        return make_r2_scorer(self.scores(outputs), np.asarray(labels, np.float64).reshape(len(labels), -1))


def parse_numbers(value: Any) -> list[float]:
    """Parse a label as numbers, one or more, also from a column of texts. Raises DataError."""
    values = value if isinstance(value, (list, tuple)) else [value]
    try:
        numbers = [float(each) for each in values]
    except (TypeError, ValueError):
        numbers = []
    if not numbers or any(isinstance(each, bool) for each in values) or not np.isfinite(numbers).all():
        raise DataError(f"label {value!r} is no score; expected a number, or a list of numbers")
    return numbers
