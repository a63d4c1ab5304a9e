"""Mean average precision of detections, as COCO's evaluation computes it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from laconic.arrays import Array
from laconic.metrics import Scorer
from laconic.tasks.detections import MOST, Detections, measure_iou

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""The intersections over union from which on an object counts as found."""
RECALLS = np.linspace(0, 1, 101)
"""The recalls at which precision is averaged."""


class ClassMatches(NamedTuple):
    """The objects of one class in all samples, found and wanted.

    sample: that each found object is of, those with the highest scores first, [found]. right: whether it is one of the
    wanted objects, at each of THRESHOLDS, [found, thresholds]. wanted: the number of wanted objects in each sample,
    [samples].
    """

    sample: Array
    right: Array
    wanted: Array


def make_precision_scorer(found: Sequence[Detections], wanted: Sequence[Detections]) -> Scorer:
    """Make a scorer of the mean average precision over classes and thresholds, AP@[.5:.95] of all sizes of objects.

    A class that none of the chosen samples has does not count; where no class does, the score is 0. As in COCO, at most
    MOST objects of a sample and a class count.
    """
    classes = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.classes for each in wanted)]))
    matches = [match_class(found, wanted, number) for number in classes.tolist()]

    def score(index: Array) -> float:
        copies = np.bincount(index, minlength=len(found))
        precisions = [average_precision(each, copies) for each in matches if copies @ each.wanted]
        return float(np.mean(precisions)) if precisions else 0.0

    return Scorer(score, np.array([each.wanted for each in matches]).reshape(len(matches), len(found)))


def match_class(found: Sequence[Detections], wanted: Sequence[Detections], number: int) -> ClassMatches:
    """The objects of one class in all samples. number: of the class."""
    scores, samples, right = [], [], []
    counts = np.zeros(len(found), np.int64)
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        own, goal = (each.pick(each.classes == number) for each in (ours, theirs))
        own = own.pick(np.argsort(-own.scores, kind="stable")[:MOST])
        counts[place] = len(goal.scores)
        scores.append(own.scores)
        samples.append(np.full(len(own.scores), place))
        right.append(match_boxes(own.boxes, goal.boxes))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return ClassMatches(np.concatenate(samples)[order], np.concatenate(right)[order], counts)


def match_boxes(boxes: Array, wanted: Array) -> Array:
    """Whether each box is one of the wanted boxes, at each of THRESHOLDS, [boxes, thresholds].

    In the order given, each box takes the wanted box that it shares most with, of those that are left.
    """
    right = np.zeros((len(boxes), len(THRESHOLDS)), np.bool_)
    if not len(wanted):
        return right
    shares = measure_iou(boxes, wanted)
    free = np.ones((len(THRESHOLDS), len(wanted)), np.bool_)
    every = np.arange(len(THRESHOLDS))
    for place, share in enumerate(shares):
        left = np.where(free, share, -1.0)
        best = left.argmax(axis=1)
        right[place] = left[every, best] >= THRESHOLDS - 1e-10
        free[every[right[place]], best[right[place]]] = False
    return right


def average_precision(matches: ClassMatches, copies: Array) -> float:
    """The precision of a class, averaged over RECALLS and THRESHOLDS.

    copies: how often each sample counts, [samples]. Of all precisions at a recall or beyond it, the highest counts.
    """
    weight = copies[matches.sample][:, None]
    right = np.cumsum(weight * matches.right, axis=0)
    recall = right / (copies @ matches.wanted)
    precision = right / np.maximum(np.cumsum(weight, axis=0), 1)
    highest = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    padded = np.concatenate([highest, np.zeros((1, len(THRESHOLDS)))])
    places = [np.searchsorted(column, RECALLS) for column in recall.T]
    return float(np.mean([padded[place, number] for number, place in enumerate(places)]))
