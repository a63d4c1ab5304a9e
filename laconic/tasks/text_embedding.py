"""Text embedding: a text to a vector."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from laconic.arrays import Arrays, first
from laconic.errors import InputError
from laconic.metrics import Scorer, cosine, make_scorer, spearman
from laconic.tasks.embedding import Embedding, has_image_config, has_two_towers
from laconic.tasks.row_parsing import SCORE, is_pair, read_pair
from laconic.tasks.text import TextTask


class TextEmbedding(Embedding, TextTask):
    """Pairs of texts with a score come as two samples in a row that share their label, a float; the metric is then
    Spearman's correlation of cosine and score."""

    name = "text-embedding"
    columns = (*TextTask.columns, SCORE)
    embeds = True
    auto_class = "AutoModel"
    architectures = ("Model", "SentenceTransformer")

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        if is_pair(values):
            return read_pair(values), parse_score(values.get(SCORE))
        return super().read_row(values, folder)

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        return not has_image_config(config) and not has_two_towers(config)

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        vectors = first(outputs)
        if all(isinstance(label, float) for label in labels):
            cosines, scores = cosine(vectors[0::2], vectors[1::2]), np.array(labels[0::2])
            return make_scorer(lambda index: spearman(cosines[index // 2], scores[index // 2]), len(vectors))
        return super().scorer(outputs, labels)


def parse_score(value: Any) -> float | None:
    """Parse the score of a pair of texts, any finite number; None where there is none. Raises InputError."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not np.isfinite(number):
        raise InputError(f"expected a number under {SCORE!r}, got {value!r}")
    return number
