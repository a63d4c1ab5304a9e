"""Similarity metrics between two sets of outputs, and their bootstrap confidence intervals. Arrays in, numbers out."""

from collections.abc import Callable, Sequence

import numpy as np

from laconic.arrays import Array, softmax

Scorer = Callable[[Array], float]
"""Takes the indices of samples (with repeats, when resampled) and returns the metric over them; higher is better."""


def cosine(reference: Array, candidate: Array) -> Array:
    """Cosine similarity of each sample's output with its reference, all axes after the first flattened.

    reference, candidate: [samples, ...]. Returns [samples] float64. Two zero vectors give 1, a single one gives 0.
    """
    a = reference.reshape(len(reference), -1).astype(np.float64)
    b = candidate.reshape(len(candidate), -1).astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    same = (np.linalg.norm(a, axis=1) == 0) & (np.linalg.norm(b, axis=1) == 0)
    return np.where(same, 1.0, np.einsum("ij,ij->i", a, b) / np.where(norms == 0, 1.0, norms))


def overlap(reference: Array, candidate: Array) -> Array:
    """The probability mass that two classifiers agree on: 1 - total variation distance, per sample.

    reference, candidate: logits [samples, classes]. Returns [samples] in 0..1.
    """
    return np.asarray(np.minimum(softmax(reference), softmax(candidate)).sum(axis=-1))


def ranks(values: Array) -> Array:
    """Ranks from 0, ties sharing their average rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts) + (ends - 1))[inverse] / 2.0)


def spearman(a: Array, b: Array) -> float:
    """Spearman's rank correlation of two vectors; if either is constant, 1 where they are equal, else 0."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else float(np.array_equal(a, b))


def cosine_matrix(embeddings: Array) -> Array:
    """Cosine similarities of all pairs. embeddings: [samples, width]. Returns [samples, samples] float64."""
    unit = embeddings.astype(np.float64)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit @ unit.T)


def find_nearest_neighbours(embeddings: Array) -> Array:
    """Find each sample's nearest other sample by cosine similarity. Returns [samples] indices."""
    pairs = cosine_matrix(embeddings)
    np.fill_diagonal(pairs, -np.inf)
    return np.asarray(pairs.argmax(axis=1))


def make_mean_scorer(values: Array) -> Scorer:
    """Make a scorer that averages one value per sample. values: [samples]."""
    return lambda index: float(values[index].mean())


def make_f1_scorer(correct: Array, found: Array, wanted: Array) -> Scorer:
    """Make a scorer of the micro-averaged F1, 1 where nothing is found and nothing is wanted.

    correct, found, wanted: how many items of each sample are both found and wanted, found, wanted, [samples].
    """

    def score(index: Array) -> float:
        total = int(found[index].sum() + wanted[index].sum())
        return 2 * float(correct[index].sum()) / total if total else 1.0

    return score


def count_edits(found: Sequence[str], wanted: Sequence[str]) -> int:
    """The fewest words to replace, to add and to leave out that make one text of another (Levenshtein, 1966)."""
    costs = list(range(len(wanted) + 1))
    for row, word in enumerate(found, 1):
        above, costs[0] = costs[0], row
        for column, other in enumerate(wanted, 1):
            above, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, above + (word != other)),
            )
    return costs[-1]


def make_word_scorer(found: Sequence[str], wanted: Sequence[str]) -> Scorer:
    """Make a scorer of the word accuracy: 1 minus the word error rate, which counts wrong, missing and added words per
    word of what is wanted. found, wanted: the texts of each sample."""
    edits = np.array([count_edits(one.split(), other.split()) for one, other in zip(found, wanted, strict=True)])
    words = np.array([len(text.split()) for text in wanted])
    return lambda index: 1 - float(edits[index].sum()) / max(int(words[index].sum()), 1)


def bootstrap_interval(
    statistic: Callable[[Array], float], samples: int, *, seed: int, rounds: int = 1000
) -> tuple[float, float]:
    """95 % percentile bootstrap confidence interval of a statistic.

    statistic: takes the indices of a resample. samples: how many there are. rounds: number of resamples. For a paired
    comparison pass the difference of two scorers as the statistic, so that both see the same resample
    (Efron & Tibshirani, An Introduction to the Bootstrap, 1993).
    """
    rng = np.random.default_rng(seed)
    draws = [statistic(rng.integers(0, samples, samples)) for _ in range(rounds)]
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)
