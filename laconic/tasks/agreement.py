"""How much of one kind of information in the original's answers a candidate's answers keep."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from laconic.arrays import Array
from laconic.metrics import explain_variance, make_word_scorer, spearman, sum_squares

ALL = "all answers"
"""The subject of an agreement that is not of one class or output."""
CLASS_LEAST = 0.9
"""The least recall and precision of each class."""
FEWEST_ANSWERS = 2
"""A class with fewer answers is not looked at alone: one that is lost is never beyond doubt."""


class Agreement(NamedTuple):
    """One figure of a candidate's answers beside the original's: 1 where they are the same, 0 or less by chance.

    name: of the figure, as `neighbour_agreement`. least: the value that the default tolerance requires, 0 where the
    figure is only shown. subject: the part of the answers it is of, as `class 'fraud'`. decisions: how many of
    them the value is a share of; None where it is no share.
    """

    name: str
    value: float
    least: float = 0.0
    subject: str = ALL
    decisions: int | None = None


def compare_classes(reference: Array, candidate: Array, name: Callable[[int], str]) -> Iterator[Agreement]:
    """Compare decisions between classes: the share that is the same, and the recall and precision of each class.

    reference, candidate: the number of a class for each decision, [decisions]. name: of a class, by its number.
    """
    same = reference == candidate
    yield Agreement("agreement", float(same.mean()) if same.size else 1.0, decisions=same.size)
    numbers, counts = np.unique(reference, return_counts=True)
    for number in numbers[counts >= FEWEST_ANSWERS].tolist():
        yield from compare_class(reference == number, candidate == number, name(number))


def compare_class(wanted: Array, answered: Array, subject: str, least: float = CLASS_LEAST) -> Iterator[Agreement]:
    """The recall and the precision of one class. wanted, answered: whether each decision is for it, [decisions]."""
    both = int((wanted & answered).sum())
    for name, decisions in (("recall", wanted), ("precision", answered)):
        if (total := int(decisions.sum())) >= FEWEST_ANSWERS:
            yield share_of(both, total, name, least, subject)


def share_of(count: int, total: int, name: str, least: float, subject: str = ALL) -> Agreement:
    """An agreement that is a share of decisions; 1 where there are none."""
    return Agreement(name, count / total if total else 1.0, least, subject, total)


SCORES_LEAST, MIDDLE_LEAST = 0.98, 0.8
"""The least explained variance of scores, and of those that are neither the highest nor the lowest twentieth: a few
large scores make any variance large."""
TAIL = 0.05


def compare_scores(reference: Array, candidate: Array, subject: str) -> Iterator[Agreement]:
    """Compare single numbers by the variance that is left unexplained and by their ranks. Arrays: [samples]."""
    yield Agreement("spearman", spearman(reference, candidate), subject=subject)
    limits = np.quantile(reference, [TAIL, 1 - TAIL])
    middle = [np.clip(each, *limits) for each in (reference, candidate)]
    pairs = (("explained_variance", SCORES_LEAST, [reference, candidate]), ("explained_middle", MIDDLE_LEAST, middle))
    for name, least, pair in pairs:
        for share in explain_variance(*(each[:, None] for each in pair)):
            yield Agreement(name, float(share), least, subject)


NUMBERS_LEAST = 0.9
"""The least explained variance of an output."""
EACH_LEAST = 0.5
"""The least explained variance of a number of an output on its own; of many numbers, their mean."""
MOST_NUMBERS = 20
"""An output with more numbers is a vector or a map, of which a few numbers may be lost."""
FLAT = 1e-10
"""The share of an array's squares that are rounding errors of float32."""


def compare_numbers(reference: Array, candidate: Array, subject: str) -> Iterator[Agreement]:
    """Compare an output of numbers by the variance that is left unexplained, which is all of it for a constant answer.

    reference, candidate: [samples, ...]. Three views, since what the numbers are for is not known: all numbers
    together, as in a vector; each number in a unit of its own, as in a table, where one in Pascal would hide the
    others; and the numbers of a sample less their mean, as in logits, which may share any offset.
    """
    squares = sum_squares(reference, candidate)
    columns = squares.explained
    if not columns.size:
        return
    yield Agreement("explained_variance", squares.explained_together, NUMBERS_LEAST, subject)
    if 1 < columns.size <= MOST_NUMBERS:
        yield Agreement("explained_variance_worst", float(columns.min()), EACH_LEAST, subject)
    elif columns.size > MOST_NUMBERS:
        yield Agreement("explained_variance_each", float(columns.clip(0, 1).mean()), EACH_LEAST, subject)
    if len(squares.total) > 1:
        centred = sum_squares(reference, candidate, centred=True)
        if centred.spread.sum() > FLAT * squares.total.sum():
            yield Agreement("explained_variance_centred", centred.explained_together, NUMBERS_LEAST, subject)


WORDS_LEAST = 0.8
"""The least share of the original's words that an answer keeps."""


def compare_words(reference: Sequence[str], candidate: Sequence[str]) -> Iterator[Agreement]:
    """Compare texts by the word error rate, where the reference has any words. Texts by sample."""
    words = sum(len(text.split()) for text in reference)
    if words:
        kept = make_word_scorer(candidate, reference)(np.arange(len(reference)))
        yield Agreement("word_accuracy", kept, WORDS_LEAST)
