"""Similarity metrics between two sets of outputs, and metrics against labels. Arrays in, numbers out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from laconic.arrays import Array, softmax

ROUNDING = 1e-12
"""The variance of a column, as a share of its mean square, that comes from the rounding of float32 alone."""
BLOCK = 1 << 17
"""Numbers that are compared at once in float64, so that they stay in the processor's cache: 2.3 s became 0.5 s for 50
answers of 265,000 numbers each."""


@dataclass(frozen=True)
class Scorer:
    """A metric of some outputs against labels; higher is better.

    score: takes the indices of samples (with repeats, when resampled) and returns the metric over them. weights: how
    much each sample counts in each of the parts that the metric is the mean of, [parts, samples]; one part for all but
    means over classes. values: of each sample where the metric over all samples is their mean, [samples].
    is_bounded: whether it is between 0 and 1, so that no sample can change by more.
    """

    score: Callable[[Array], float]
    weights: Array
    values: Array | None = None
    is_bounded: bool = True

    def __call__(self, index: Array) -> float:
        """Compute the metric over some samples."""
        return self.score(index)


def cosine(reference: Array, candidate: Array) -> Array:
    """Return the cosine similarity of each sample's output with its reference, all axes after the first flattened.

    reference, candidate: [samples, ...]. Returns [samples] float64. Two zero vectors give 1, a single one gives 0.
    """
    products = np.zeros((3, len(reference)))
    for a, b in split_columns(reference, candidate):
        products += [np.einsum("ij,ij->i", *pair) for pair in ((a, a), (b, b), (a, b))]
    ours, theirs = np.sqrt(products[:2])
    norms = ours * theirs
    return np.where((ours == 0) & (theirs == 0), 1.0, products[2] / np.where(norms == 0, 1.0, norms))


def split_columns(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield a few columns at a time of arrays of one size, [samples, ...] with all axes after the first flattened, in
    float64."""
    flat = [array.reshape(len(array), -1) for array in arrays]
    width = max(BLOCK // max(len(flat[0]), 1), 1)
    for start in range(0, flat[0].shape[1], width):
        yield tuple(array[:, start : start + width].astype(np.float64) for array in flat)


def overlap(reference: Array, candidate: Array) -> Array:
    """Return the probability mass that two classifiers agree on: 1 - total variation distance, per sample.

    reference, candidate: logits [samples, classes]. Returns [samples] in 0..1.
    """
    return np.asarray(np.minimum(softmax(reference), softmax(candidate)).sum(axis=-1))


def measure_closeness(reference: Array, candidate: Array) -> Array:
    """Measure how close each number is to its reference: 1 / (1 + d^2 / 2) for a difference of d standard deviations of
    the reference's column, which is the cosine of vectors with a small relative error of d: 0.995 for a tenth. Where a
    column does not vary, its largest number is the unit. reference, candidate: [samples, columns]. Returns [samples,
    columns] float64.
    """
    a, b = reference.astype(np.float64), candidate.astype(np.float64)
    largest = np.abs(a).max(axis=0)
    spread = a.std(axis=0)
    scale = np.where(spread > ROUNDING**0.5 * largest, spread, largest)
    return np.asarray(1 / (1 + np.square((b - a) / np.where(scale > 0, scale, 1.0)) / 2))


def explain_variance(reference: Array, candidate: Array) -> Array:
    """Return the share of each column's variance that is explained, the coefficient of determination: 1 for equal
    columns, 0 for the mean of the reference. reference, candidate: [samples, columns]. Returns one share for each
    column of the reference that varies, float64."""
    return sum_squares(reference, candidate).explained


class Squares(NamedTuple):
    """Sums of squares of each column of two outputs, [columns] float64. total: of the reference. spread: of the
    reference less its mean. left: of the difference."""

    total: Array
    spread: Array
    left: Array

    @property
    def explained(self) -> Array:
        """The share of the variance of each column that is explained, of those that vary."""
        varies = self.spread > ROUNDING * self.total
        return np.asarray(1 - self.left[varies] / self.spread[varies])

    @property
    def explained_together(self) -> float:
        """The share of the variance of all columns together that is explained."""
        spread = self.spread.sum()
        return float(1 - self.left.sum() / spread) if spread else 1.0


def sum_squares(reference: Array, candidate: Array, *, centred: bool = False) -> Squares:
    """Sum the squares of each column. reference, candidate: [samples, ...], all axes after the first flattened.
    centred: of the numbers less the mean of their sample."""
    means = [np.zeros((len(reference), 1))] * 2
    if centred:
        means = [
            array.reshape(len(array), -1).mean(axis=1, keepdims=True, dtype=np.float64)
            for array in (reference, candidate)
        ]
    parts = []
    for blocks in split_columns(reference, candidate):
        a, b = (block - mean for block, mean in zip(blocks, means, strict=True))
        parts.append([np.square(each).sum(axis=0) for each in (a, a - a.mean(axis=0), a - b)])
    return Squares(*(np.concatenate(part) for part in zip(*parts, strict=True)) if parts else [np.zeros(0)] * 3)


def ranks(values: Array) -> Array:
    """Return ranks from 0, ties sharing their average rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts) + (ends - 1))[inverse] / 2.0)


def spearman(a: Array, b: Array) -> float:
    """Return Spearman's rank correlation of two vectors; if either is constant, 1 where they are equal, else 0."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else float(np.array_equal(a, b))


def cosine_matrix(embeddings: Array) -> Array:
    """Return the cosine similarities of all pairs. embeddings: [samples, width]. Returns [samples, samples] float64."""
    unit = embeddings.astype(np.float64)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit @ unit.T)


def find_nearest_neighbours(embeddings: Array) -> Array:
    """Find each sample's nearest other sample by cosine similarity. Returns [samples] indices."""
    pairs = cosine_matrix(embeddings)
    np.fill_diagonal(pairs, -np.inf)
    return np.asarray(pairs.argmax(axis=1))


def make_scorer(score: Callable[[Array], float], samples: int) -> Scorer:
    """Make a scorer to which each of so many samples counts as much as every other."""
    return Scorer(score, np.ones((1, samples)))


def make_mean_scorer(values: Array) -> Scorer:
    """Make a scorer that averages one value per sample. values: [samples]."""
    return Scorer(lambda index: float(values[index].mean()), np.ones((1, len(values))), values)


def make_ratio_scorer(sums: Array, counts: Array) -> Scorer:
    """Make a scorer of an unbounded mean over the items of all samples, 0 without items. sums, counts: of the items of
    each sample, [samples]."""

    def score(index: Array) -> float:
        return float(sums[index].sum()) / max(int(counts[index].sum()), 1)

    # A sample without items changes nothing, a short one little: what a sample adds is by the mean number of items.
    return Scorer(score, np.ones((1, len(counts))), sums / max(counts.mean(), 1e-12), is_bounded=False)


def make_f1_scorer(correct: Array, predicted: Array, expected: Array) -> Scorer:
    """Make a scorer of the micro-averaged F1, 1 where nothing is found and nothing is wanted.

    correct, predicted, expected: how many items of each sample are both found and wanted, found, wanted, [samples].
    """

    def score(index: Array) -> float:
        total = int(predicted[index].sum() + expected[index].sum())
        return 2 * float(correct[index].sum()) / total if total else 1.0

    return Scorer(score, (predicted + expected)[None])


def make_r2_scorer(predictions: Array, labels: Array) -> Scorer:
    """Make a scorer of the coefficient of determination, the mean over the outputs; 0 for labels that do not vary.

    predictions, labels: [samples, outputs] float64.
    """

    def score(index: Array) -> float:
        total = np.square(labels[index] - labels[index].mean(axis=0)).sum(axis=0)
        left = np.square(labels[index] - predictions[index]).sum(axis=0)
        return float(np.where(total > 0, 1 - left / np.where(total > 0, total, 1), 0).mean())

    return make_scorer(score, len(labels))


def count_edits(words: Sequence[str], reference: Sequence[str]) -> int:
    """Count the fewest words to replace, to add and to leave out that make one text of another (Levenshtein, 1966)."""
    costs = list(range(len(reference) + 1))
    for row, word in enumerate(words, 1):
        above, costs[0] = costs[0], row
        for column, other in enumerate(reference, 1):
            above, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, above + (word != other)),
            )
    return costs[-1]


def make_word_scorer(texts: Sequence[str], references: Sequence[str]) -> Scorer:
    """Make a scorer of the word accuracy: 1 minus the word error rate, which counts wrong, missing and added words per
    word of what is wanted. texts, references: the texts of each sample."""
    edits = np.array([count_edits(one.split(), other.split()) for one, other in zip(texts, references, strict=True)])
    words = np.array([len(text.split()) for text in references])
    return Scorer(lambda index: 1 - float(edits[index].sum()) / max(int(words[index].sum()), 1), words[None])
