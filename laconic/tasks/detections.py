"""Objects in an image: classes, scores and boxes from the outputs of a detector, how much two sets of them have in
common, and the mean average precision as in COCO's evaluation."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from laconic.arrays import Array, Arrays, sigmoid, softmax
from laconic.metrics import Scorer

MOST = 100
"""The most objects of an image, or of an image and a class, that are compared, as in COCO's evaluation."""
LEAST_WEIGHT = 1e-4
"""The least weight, the square of the score, of an object that is compared."""


class Scoring(BaseModel):
    """How the logits of a detector become scores.

    activation: `softmax` over the classes of a query and a last one for no object, of which the likeliest class counts;
    `sigmoid` for each class of each query alone. most: the most pairs of query and class that are kept with `sigmoid`;
    None for as many as there are queries.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    activation: Literal["softmax", "sigmoid"] = "softmax"
    most: int | None = None


class Detections(NamedTuple):
    """Objects of an image. scores: [objects]. classes: their numbers, [objects]. boxes: left, top, right and bottom as
    shares of the width and the height, [objects, 4] float32."""

    scores: Array
    classes: Array
    boxes: Array

    def pick(self, which: Array) -> "Detections":
        """Return some of the objects. which: indices, or a mask."""
        return Detections(*(each[which] for each in self))


def find_detections(logits: Array, boxes: Array, scoring: Scoring) -> Detections:
    """Find the objects that a detector finds in an image, in the order of transformers' processors.

    logits: [queries, classes]. boxes: centre, width and height as shares of the image's, [queries, 4].
    """
    corners = to_corners(boxes)
    if scoring.activation == "softmax":
        scores = softmax(logits)[:, :-1]
        classes = scores.argmax(axis=-1)
        return Detections(scores.max(axis=-1), classes, corners)
    scores = sigmoid(logits.astype(np.float64)).ravel()
    kept = np.argsort(-scores, kind="stable")[: scoring.most or len(logits)]
    query, classes = np.divmod(kept, logits.shape[1])
    return Detections(scores[kept], classes, corners[query])


def to_corners(boxes: Array) -> Array:
    """Convert boxes given by centre, width and height to left, top, right and bottom, [boxes, 4]."""
    centre, half = boxes[:, :2], boxes[:, 2:] * np.float32(0.5)
    return np.concatenate([centre - half, centre + half], axis=1)


def measure_iou(one: Array, other: Array) -> Array:
    """Measure the intersection over union of all pairs, [boxes, others] float64; 0 for two boxes without an area.

    one, other: corners, [boxes, 4] and [others, 4].
    """
    one, other = one.astype(np.float64), other.astype(np.float64)
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=-1)
    areas = [np.clip(each[:, 2:] - each[:, :2], 0, None).prod(axis=-1) for each in (one, other)]
    union = areas[0][:, None] + areas[1][None] - shared
    return np.asarray(shared / np.where(union > 0, union, 1))


def compare_detections(reference: Detections, candidate: Detections) -> float:
    """Return how much two sets of objects have in common, from 0 to 1.

    An object weighs the square of its score, so that the many guesses of a detector about nothing weigh little. Each is
    paired with one of the same class at most, the pairs that share most first; a pair shares the smaller weight times
    the intersection over union of the boxes, and lacks what the larger weight has beyond. An image in which both find
    next to nothing counts as one with a sure object, so that differences of these guesses alone are small.
    """
    expected, actual = (prune_detections(each) for each in (reference, candidate))
    weights = np.square(expected.scores), np.square(actual.scores)
    lesser = np.minimum(weights[0][:, None], weights[1][None])
    value = lesser * measure_iou(expected.boxes, actual.boxes) * (expected.classes[:, None] == actual.classes[None])
    shared, total = 0.0, float(weights[0].sum() + weights[1].sum())
    for row, column in pair_greedily(value):
        shared += float(value[row, column])
        total -= float(lesser[row, column])
    return float(np.clip(1 - (total - shared) / max(total, 1.0), 0.0, 1.0))


def prune_detections(objects: Detections) -> Detections:
    """Keep the objects that weigh something, the surest first."""
    order = np.argsort(-objects.scores, kind="stable")[:MOST]
    return objects.pick(order[np.square(objects.scores[order]) >= LEAST_WEIGHT])


def pair_greedily(value: Array) -> list[tuple[int, int]]:
    """Return pairs of a row and a column, none of them twice, those of the largest values first; without those of value
    0.

    value: [rows, columns], not negative.
    """
    left, pairs = value.copy(), []
    while left.size and left.max() > 0:
        row, column = divmod(int(left.argmax()), left.shape[1])
        pairs.append((row, column))
        left[row], left[:, column] = 0, 0
    return pairs


def align_queries(reference: Arrays, candidate: Arrays) -> Arrays:
    """Return the candidate's outputs with the queries of each sample in the order of those of the reference that they
    are nearest to. Outputs are [samples, queries, ...]."""
    rows = zip(*reference.values(), *(candidate[name] for name in reference), strict=True)
    orders = []
    for row in rows:
        expected, actual = (np.concatenate(half, axis=-1) for half in (row[: len(reference)], row[len(reference) :]))
        distance = np.abs(expected[:, None] - actual[None]).max(axis=-1)
        orders.append([column for _, column in sorted(pair_greedily(1 / (1 + distance)))])
    return {name: np.take_along_axis(array, np.array(orders)[..., None], axis=1) for name, array in candidate.items()}


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


def make_precision_scorer(detections: Sequence[Detections], objects: Sequence[Detections]) -> Scorer:
    """Make a scorer of the mean average precision over classes and thresholds, AP@[.5:.95] of all sizes of objects.

    A class that none of the chosen samples has does not count; where no class does, the score is 0. As in COCO, at most
    MOST objects of a sample and a class count.
    """
    classes = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.classes for each in objects)]))
    matches = [match_class(detections, objects, number) for number in classes.tolist()]

    def score(index: Array) -> float:
        copies = np.bincount(index, minlength=len(detections))
        precisions = [average_precision(each, copies) for each in matches if copies @ each.wanted]
        return float(np.mean(precisions)) if precisions else 0.0

    return Scorer(score, np.array([each.wanted for each in matches]).reshape(len(matches), len(detections)))


def match_class(detections: Sequence[Detections], objects: Sequence[Detections], number: int) -> ClassMatches:
    """Return the objects of one class in all samples. number: of the class."""
    scores, samples, right = [], [], []
    counts = np.zeros(len(detections), np.int64)
    for place, (ours, theirs) in enumerate(zip(detections, objects, strict=True)):
        candidates, goal = (each.pick(each.classes == number) for each in (ours, theirs))
        candidates = candidates.pick(np.argsort(-candidates.scores, kind="stable")[:MOST])
        counts[place] = len(goal.scores)
        scores.append(candidates.scores)
        samples.append(np.full(len(candidates.scores), place))
        right.append(match_boxes(candidates.boxes, goal.boxes))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return ClassMatches(np.concatenate(samples)[order], np.concatenate(right)[order], counts)


def match_boxes(boxes: Array, targets: Array) -> Array:
    """Return whether each box is one of the wanted boxes, at each of THRESHOLDS, [boxes, thresholds].

    In the order given, each box takes the wanted box that it shares most with, of those that are left.
    """
    right = np.zeros((len(boxes), len(THRESHOLDS)), np.bool_)
    if not len(targets):
        return right
    shares = measure_iou(boxes, targets)
    free = np.ones((len(THRESHOLDS), len(targets)), np.bool_)
    every = np.arange(len(THRESHOLDS))
    for place, share in enumerate(shares):
        left = np.where(free, share, -1.0)
        best = left.argmax(axis=1)
        right[place] = left[every, best] >= THRESHOLDS - 1e-10
        free[every[right[place]], best[right[place]]] = False
    return right


def average_precision(matches: ClassMatches, copies: Array) -> float:
    """Return the precision of a class, averaged over RECALLS and THRESHOLDS.

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
