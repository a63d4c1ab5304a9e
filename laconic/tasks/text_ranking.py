"""Text ranking: a query and a document to how well the document answers the query (a cross-encoder)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from laconic.arrays import Arrays
from laconic.errors import DataError, InputError
from laconic.metrics import Scorer, make_scorer, spearman
from laconic.tasks.checkpoint_loading import count_outputs
from laconic.tasks.text import PAIR_SCHEMA
from laconic.tasks.text_regression import TextRegression

MARKS = ("sentence_transformers", "sbert_ce_default_activation_function")
"""Keys of config.json that a CrossEncoder of sentence-transformers writes."""


class TextRanking(TextRegression):
    """A sample is a pair of texts. Labels are relevances from 0 to 1, and the metric is their rank correlation with the
    scores (Spearman)."""

    name = "text-ranking"
    ranks = True
    field_description = 'A pair of texts in a list, as [["query", "document"]], or several.'
    metric = "spearman"
    objective = "binary-cross-entropy"

    problem_type = None

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        return count_outputs(config) == 1

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        return cls.fits(config) and any(name in config for name in MARKS)

    def sample_schema(self) -> dict[str, Any]:
        return PAIR_SCHEMA

    def parse(self, value: Any) -> Any:
        sample = super().parse(value)
        if isinstance(sample, str):
            raise InputError('a sample must be a pair of texts, as ["query", "document"], not a single text')
        return sample

    def parse_label(self, value: Any, sample: Any) -> Any:
        numbers = super().parse_label(value, sample)
        if not 0 <= numbers[0] <= 1:
            raise DataError(f"label {value!r} is no relevance; expected 0 to 1")
        return numbers

    def example_request(self) -> dict[str, Any]:
        return {self.field: [["Where do cats sleep?", "A cat sleeps on a warm mat."]]}

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        texts = super().examples(2 * count, seed)
        return list(zip(texts[0::2], texts[1::2], strict=True))

    def fragments(self, samples: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
        texts = super().fragments(samples, 2 * count, seed)
        return list(zip(texts[0::2], texts[1::2], strict=True))

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        scores, relevances = self.scores(outputs)[:, 0], np.asarray(labels, np.float64)[:, 0]
        return make_scorer(lambda index: spearman(scores[index], relevances[index]), len(relevances))
