"""Text embedding: a text to a vector."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.metrics import Scorer, cosine, cosine_matrix, find_nearest_neighbours, make_mean_scorer, spearman
from laconic.tasks.task import SCORE, HealingLoss, Tolerance, first
from laconic.tasks.text import TextTask, is_pair, read_pair


class TextEmbedding(TextTask):
    """Fidelity is the cosine with the original's vector.

    Labels are classes (the metric is the accuracy of the nearest neighbour's class). Pairs of texts with a score come
    as two samples in a row that share their label, a float (the metric is Spearman's correlation of cosine and score).
    """

    name = "text-embedding"
    tolerance = Tolerance(mean=0.99, worst=0.95)
    columns = (*TextTask.columns, SCORE)
    metric = "nearest-neighbour accuracy"
    embeds = True
    objective = "text-embedding"
    has_logits = False
    auto_class = "AutoModel"
    architectures = ("Model", "SentenceTransformer")

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        if is_pair(values):
            return read_pair(values), parse_score(values.get(SCORE))
        return super().read_row(values, folder)

    def parse_label(self, value: Any, sample: Any) -> Any:
        if isinstance(value, (str, int)):
            return value
        raise InputError(f"a label must be the name or the number of a class, not {value!r}; scores are for pairs")

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        return [{"embedding": row} for row in first(outputs)]

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        return cosine(first(reference), first(candidate))

    def figures(self, reference: Arrays, candidate: Arrays) -> dict[str, float]:
        a, b = first(reference), first(candidate)
        if len(a) < 3:
            return {}
        upper = np.triu_indices(len(a), 1)
        return {
            "similarity_spearman": spearman(cosine_matrix(a)[upper], cosine_matrix(b)[upper]),
            "neighbour_agreement": float((find_nearest_neighbours(a) == find_nearest_neighbours(b)).mean()),
        }

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """The vectors and their similarities; before them all hidden states, where layers are shared."""
        shared: dict[HealingLoss, float] = {"hidden-states": 1.0} if layers else {}
        return {**shared, "vectors": 1.0, "similarities": 5.0}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        vectors = first(outputs)
        if all(isinstance(label, float) for label in labels):
            cosines, scores = cosine(vectors[0::2], vectors[1::2]), np.array(labels[0::2])
            return lambda index: spearman(cosines[index // 2], scores[index // 2])
        names = np.array([str(label) for label in labels])
        return make_mean_scorer((names[find_nearest_neighbours(vectors)] == names).astype(np.float64))


def parse_score(value: Any) -> float | None:
    """The score of a pair of texts, any finite number; None where there is none. Raises InputError."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not np.isfinite(number):
        raise InputError(f"expected a number under {SCORE!r}, got {value!r}")
    return number
