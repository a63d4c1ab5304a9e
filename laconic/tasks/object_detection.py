"""Object detection: the objects in an image, each with its class and its box."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import DataError, InputError
from laconic.metrics import Scorer
from laconic.tasks.agreement import FEWEST_ANSWERS, Agreement, share_of
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.assets import read_asset, to_json
from laconic.tasks.classes import find_class
from laconic.tasks.detections import (
    Detections,
    Scoring,
    align_queries,
    compare_detections,
    find_detections,
    make_precision_scorer,
    measure_iou,
)
from laconic.tasks.image_localization import SIZE, ImageLocalization
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.null_answers import SURE, repeat_mean, shuffle_rows
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.row_parsing import LABEL
from laconic.tasks.tolerance import Tolerance
from laconic.tensor import TensorSpec

THRESHOLD = 0.5
"""The score above which an object is in an answer, as in transformers' pipeline."""
OBJECTS_LEAST = 0.8
"""The least share of objects of a class that both models find."""
OBJECTS = "objects"
"""The column of the objects of an image in data sets that were made from COCO's form."""
SIDES = ("xmin", "ymin", "xmax", "ymax")
FORM = "{'label': 'cat', 'box': {'xmin': 10, 'ymin': 20, 'xmax': 50, 'ymax': 90}}, in pixels of the image"
SCORING = "detection.json"
"""The artifact file that says how logits become scores."""


class ObjectDetection(ImageLocalization):
    """Fidelity is the share of what the two models find that both find, by scores and boxes. The metric is COCO's mean
    average precision."""

    name = "object-detection"
    tolerance = Tolerance(mean=0.95)
    metric = "mAP"
    objective = "box-matching"
    columns: ClassVar[tuple[str, ...]] = (LABEL, OBJECTS)
    labels_alike = False
    auto_class = "AutoModelForObjectDetection"
    architectures: ClassVar[tuple[str, ...]] = ("ForObjectDetection",)

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        *,
        preprocess: ImagePreprocess,
        labels: tuple[str, ...] = (),
        scoring: Scoring | None = None,
    ) -> None:
        super().__init__(inputs, preprocess=preprocess, labels=labels)
        self.scoring = scoring or Scoring()

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        made = super().from_preprocessing(preprocessing)
        made.scoring = preprocessing.scoring or Scoring()
        return made

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        made = super().from_assets(folder, inputs)
        made.scoring = Scoring.model_validate(read_asset(folder, SCORING))
        return made

    def assets(self) -> dict[str, bytes]:
        return super().assets() | {SCORING: to_json(self.scoring.model_dump(mode="json"))}

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read an image with its objects: under `label` as in answers, or under `objects` as in COCO's data sets."""
        samples, label = super().read_row(values, folder)
        return samples, read_columns(values[OBJECTS]) if label is None and values.get(OBJECTS) is not None else label

    def parse_label(self, value: Any, sample: Any) -> Any:
        """Return the class of each object and its box as `Detections` have it, [objects, 5] float64."""
        height, width = sample[SIZE].tolist()
        return np.array([read_object(each, self.labels, width, height) for each in check_list(value)]).reshape(-1, 5)

    def find(self, outputs: Arrays) -> list[Detections]:
        """Return the objects of each sample, whatever their scores.

        outputs: logits [samples, queries, classes] and boxes [samples, queries, 4], in this order. Raises InputError.
        """
        logits, boxes = check_outputs(outputs)
        return [find_detections(*each, self.scoring) for each in zip(logits, boxes, strict=True)]

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        return [
            {"objects": self.describe(detections, sample[SIZE])}
            for detections, sample in zip(self.find(outputs), samples, strict=True)
        ]

    def describe(self, detections: Detections, size: Array) -> list[dict[str, Any]]:
        """Return the objects of an answer, with boxes in whole pixels. size: height and width of the image as it
        came."""
        kept = detections.pick(detections.scores > THRESHOLD)
        corners = (kept.boxes * size[[1, 0, 1, 0]].astype(np.float32)).astype(np.int64)  # cut, as by transformers
        return [
            {
                "score": float(score),
                "label": self.label(int(number)),
                "box": dict(zip(SIDES, box, strict=True)),
            }
            for score, number, box in zip(kept.scores, kept.classes, corners.tolist(), strict=True)
        ]

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        pairs = zip(self.find(reference), self.find(candidate), strict=True)
        return np.array([compare_detections(expected, actual) for expected, actual in pairs], np.float64)

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        """Measure the share of each model's objects that the other finds too: of the same class, above the threshold,
        with an intersection over union of at least a half."""
        sides = [[each.pick(each.scores > THRESHOLD) for each in self.find(side)] for side in (reference, candidate)]
        for name, (ours, theirs) in {"recall": sides, "precision": sides[::-1]}.items():
            kept = [find_again(*pair) for pair in zip(ours, theirs, strict=True)]
            classes, again = np.concatenate([each.classes for each in ours]), np.concatenate(kept)
            for number in np.unique(classes).tolist():
                matches = again[classes == number]
                if len(matches) >= FEWEST_ANSWERS:
                    subject = f"objects {self.label(number)!r}"
                    yield share_of(int(matches.sum()), len(matches), name, OBJECTS_LEAST, subject)

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        """Answer with no objects at all, the mean of each query, and the objects of other samples."""
        logits, boxes = list(reference)[:2]
        nothing = np.zeros_like(reference[logits])
        if self.scoring.activation == "softmax":
            nothing[..., -1] = SURE
        else:
            nothing -= SURE
        answers = {"no objects": {logits: nothing, boxes: reference[boxes]}, "constant": repeat_mean(reference)}
        return {"shuffled": shuffle_rows(reference), **answers}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        objects = [Detections(np.ones(len(label)), label[:, 0].astype(np.int64), label[:, 1:]) for label in labels]
        return make_precision_scorer(self.find(outputs), objects)

    def align(self, reference: Arrays, candidate: Arrays) -> Arrays:
        """Put the queries in the order of the reference: a detector that chooses its queries by their scores puts
        nearly equal ones in either order."""
        return align_queries(reference, candidate)


def find_again(ours: Detections, theirs: Detections) -> Array:
    """Return whether each of our objects is among theirs: of the same class, with an intersection over union of at
    least a half. Returns bool [objects]."""
    near = (measure_iou(ours.boxes, theirs.boxes) >= 0.5) & (ours.classes[:, None] == theirs.classes[None])
    return np.asarray(near.any(axis=1))


def check_outputs(outputs: Arrays) -> tuple[Array, Array]:
    """Return the logits and the boxes of a detector. Raises InputError for outputs of other forms."""
    arrays = list(outputs.values())[:2]
    shapes = {name: list(array.shape) for name, array in outputs.items()}
    if len(arrays) < 2 or any(each.ndim != 3 for each in arrays) or arrays[1].shape[1:] != (arrays[0].shape[1], 4):
        raise InputError(
            f"object-detection takes two outputs, logits [batch, queries, classes] and boxes [batch, queries, 4], and "
            f"the model gives {shapes}"
        )
    return arrays[0], arrays[1]


def check_list(value: Any) -> Sequence[Any]:
    """Return the objects of an image. Raises DataError for anything but a list."""
    if not isinstance(value, (list, tuple)):
        raise DataError(f"a label must be a list of objects {FORM}; not {value!r}")
    return value


def read_object(value: Any, labels: Sequence[str], width: int, height: int) -> list[float]:
    """Read the number of an object's class, and the left, top, right and bottom of its box as shares of the image's
    sides.

    labels: the names of the classes. A box is cut where it leaves the image. Raises DataError.
    """
    box = value.get("box") if isinstance(value, Mapping) else None
    sides: Any = [box.get(name) for name in SIDES] if isinstance(box, Mapping) else None
    if not is_box(sides) or not isinstance(value.get("label"), (str, int)):
        raise DataError(f"{value!r} is no object; expected {FORM}")
    left, top, right, bottom = (float(side) for side in sides)
    if not (left < right and top < bottom and left < width and top < height and right > 0 and bottom > 0):
        raise DataError(
            f"the box {box} has no area in an image of {width} x {height} pixels; expected xmin < xmax and ymin < "
            f"ymax, in pixels of the image"
        )
    shares = (left / width, top / height, right / width, bottom / height)
    return [float(find_class(value["label"], labels)), *(min(max(share, 0.0), 1.0) for share in shares)]


def read_columns(value: Any) -> list[dict[str, Any]]:
    """Read objects in the form of answers, from lists under `bbox` (left, top, width and height, in pixels) and
    `category` (numbers or names of classes). Crowds (`iscrowd`) are left out. Raises DataError."""
    lists: list[Any] = [value.get(name) for name in ("bbox", "category")] if isinstance(value, Mapping) else []
    if not lists or not all(isinstance(each, (list, tuple)) for each in lists) or not all(map(is_box, lists[0])):
        raise DataError(
            f"expected under {OBJECTS!r} two lists: 'bbox', of left, top, width and height in pixels, and 'category', "
            f"the numbers or names of classes"
        )
    boxes, classes = lists
    crowds = value.get("iscrowd") or [0] * len(boxes)
    if not len(boxes) == len(classes) == len(crowds):
        raise DataError(f"there are {len(boxes)} boxes under {OBJECTS!r}, and {len(classes)} classes")
    return [
        {"label": label, "box": dict(zip(SIDES, (box[0], box[1], box[0] + box[2], box[1] + box[3]), strict=True))}
        for box, label, crowd in zip(boxes, classes, crowds, strict=True)
        if not crowd
    ]


def is_box(sides: Any) -> bool:
    """Return whether something is a list of four numbers."""
    numbers = isinstance(sides, (list, tuple)) and all(isinstance(side, (int, float)) for side in sides)
    return numbers and len(sides) == 4 and not any(isinstance(side, bool) for side in sides)
