"""Semantic segmentation: the class of each pixel of an image."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from laconic.arrays import Array, Arrays, first
from laconic.errors import DataError, InputError
from laconic.metrics import Scorer
from laconic.tasks.agreement import Agreement
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.image_localization import PIXELS, SIZE, ImageLocalization
from laconic.tasks.image_preprocess import open_image
from laconic.tasks.null_answers import SURE, shuffle_rows
from laconic.tasks.tolerance import Tolerance

IGNORED = 255
"""The number of pixels that are of no class in a map of classes, as PASCAL VOC, ADE20K and Cityscapes have it."""
SPECK = 0.005
"""The share of an image that is added to the pixels of each class, which makes little of a class that has fewer."""
IOU_LEAST, CLASS_IOU_LEAST = 0.8, 0.6
FEWEST_IMAGES = 3
"""The least intersection over union with the original's maps: the mean over classes, and of each class that several
images have."""
STRIP = 64
"""Rows of an answer whose logits are interpolated at once: those of a whole photograph take gigabytes."""


class SemanticSegmentation(ImageLocalization):
    """Fidelity is the mean of intersection over union over the classes that an image has for either model, at the
    resolution of the output, so that a background counts as one class among others. The metric is the mean over classes
    of intersection over union, at the resolution of the input."""

    name = "semantic-segmentation"
    tolerance = Tolerance(mean=0.9)
    metric = "mean IoU"
    objective = "pixel-cross-entropy"
    auto_class = "AutoModelForSemanticSegmentation"
    architectures: ClassVar[tuple[str, ...]] = ("ForSemanticSegmentation",)

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read an image, and as its label the path of a map of classes, relative to `folder`."""
        samples, label = super().read_row(values, folder)
        return samples, None if label is None else self.read_field(label, folder)

    def parse_label(self, value: Any, sample: Any) -> Any:
        """Return the number of a class for each pixel of the model's input, [height, width] int64.

        value: an image file of one channel whose values are the numbers of classes, or an array.
        """
        if isinstance(value, (bytes, Path)):
            value = np.asarray(self.preprocess.apply_to_map(read_map(value)))
        try:
            classes = np.asarray(value)
        except ValueError:
            classes = np.asarray(None)
        shape = sample[PIXELS].shape[1:]
        if classes.dtype.kind not in "iu" or classes.shape != shape:
            raise InputError(
                f"a label must be a map of classes: an image file of one channel, or integers {list(shape)}, the size "
                f"of the model's input; not {classes.dtype} {list(classes.shape)}"
            )
        beyond = classes[(classes != IGNORED) & ((classes < 0) | (classes >= (len(self.labels) or IGNORED)))]
        if beyond.size:
            raise DataError(
                f"class {beyond[0]} in a map of classes is none of the model's {len(self.labels)}. Pixels that are of "
                f"no class have the value {IGNORED}"
            )
        return classes.astype(np.int64)

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        sizes = [tuple(sample[SIZE].tolist()) for sample in samples]
        return [self.describe(row, size) for row, size in zip(first(outputs), sizes, strict=True)]

    def describe(self, logits: Array, size: tuple[int, int]) -> dict[str, Any]:
        """Return the classes of an image as a PNG of their numbers, and the share of the image that each has.

        logits: [classes, height, width]. size: height and width of the image as it came.
        """
        classes = choose_classes(logits, size)
        counts = dict(zip(*(each.tolist() for each in np.unique(classes, return_counts=True)), strict=True))
        file = io.BytesIO()
        Image.fromarray(classes.astype(np.uint8 if len(logits) <= 256 else np.uint16)).save(file, "PNG")
        return {
            "segments": [
                {"label": self.label(number), "class": number, "share": count / classes.size}
                for number, count in sorted(counts.items(), key=lambda item: -item[1])
            ],
            "mask": base64.b64encode(file.getvalue()).decode(),
        }

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        shared, either = count_overlap(first(candidate).argmax(axis=1), first(reference).argmax(axis=1), 0)
        least = SPECK * np.prod(first(reference).shape[2:])
        shares = (shared + least) / (either + least)
        return np.asarray((shares * (either > 0)).sum(axis=1) / (either > 0).sum(axis=1))

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        expected, actual = (first(each).argmax(axis=1) for each in (reference, candidate))
        shared, either = count_overlap(actual, expected, len(self.labels))
        yield Agreement("iou_with_original", make_iou_scorer(shared, either)(np.arange(len(shared))), IOU_LEAST)
        for number in np.flatnonzero(either.any(axis=0)).tolist():
            if int((expected == number).any(axis=(1, 2)).sum()) >= FEWEST_IMAGES:
                share = float(shared[:, number].sum() / either[:, number].sum())
                yield Agreement("iou", share, CLASS_IOU_LEAST, f"class {self.label(number)!r}")

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        """Return the most frequent class everywhere, as a background, the most frequent class of each place, and the
        maps of other samples."""
        (name, logits), *_ = reference.items()
        chosen = logits.argmax(axis=1)
        usual = np.bincount(chosen.ravel(), minlength=logits.shape[1]).argmax()
        background = SURE * (np.arange(logits.shape[1]) == usual)[:, None, None]
        answers = {"background": background, "constant": logits.mean(axis=0, dtype=np.float64)}
        repeated = {
            each: {name: np.broadcast_to(row.astype(logits.dtype), logits.shape)} for each, row in answers.items()
        }
        return {"shuffled": shuffle_rows({name: logits}), **repeated}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        chosen = [choose_classes(row, label.shape) for row, label in zip(first(outputs), labels, strict=True)]
        return make_iou_scorer(*count_overlap(chosen, labels, first(outputs).shape[1]))


def read_map(source: bytes | Path) -> Image.Image:
    """Read the numbers of classes in an image file. Raises InputError for one of several channels."""
    image = open_image(source)
    if image.mode not in ("1", "L", "P", "I", "I;16"):
        raise InputError(
            f"a map of classes must be an image of one channel, as a PNG of grey values or with a palette, and not of "
            f"{image.mode}"
        )
    return Image.fromarray(np.asarray(image).astype(np.int32))


def choose_classes(logits: Array, size: tuple[int, int]) -> Array:
    """Choose the likeliest class of each pixel of an image of that height and width, [height, width].

    logits: [classes, rows, columns], interpolated bilinearly between the centres of pixels, as torch does with
    align_corners=False.
    """
    above, below, down = place_between(logits.shape[1], size[0])
    left, right, across = place_between(logits.shape[2], size[1])
    chosen = np.empty(size, np.int64)
    for start in range(0, size[0], STRIP):
        rows = slice(start, start + STRIP)
        weight = down[rows, None]
        strip = logits[:, above[rows]] * (1 - weight) + logits[:, below[rows]] * weight
        chosen[rows] = (strip[:, :, left] * (1 - across) + strip[:, :, right] * across).argmax(axis=0)
    return chosen


def place_between(length: int, size: int) -> tuple[Array, Array, Array]:
    """Find for each of `size` positions along an axis of `length`, its two neighbours, and the weight of the second."""
    at = np.maximum((np.arange(size) + 0.5) * (length / size) - 0.5, 0)
    before = np.minimum(at.astype(np.int64), length - 1)
    return before, np.minimum(before + 1, length - 1), (at - before).astype(np.float32)


def count_overlap(
    maps: Sequence[Array] | Array, references: Sequence[Array] | Array, classes: int
) -> tuple[Array, Array]:
    """Return the pixels of each sample and class that both maps have, and that either has, [samples, classes] each.

    Pixels without a class in `wanted` do not count.
    """
    counts = []
    for ours, theirs in zip(maps, references, strict=True):
        kept = theirs != IGNORED
        both = theirs[kept & (ours == theirs)]
        size = max(classes, int(ours.max()) + 1, int(theirs[kept].max(initial=-1)) + 1)
        shared, one, other = (np.bincount(each, minlength=size) for each in (both, ours[kept], theirs[kept]))
        counts.append((shared, one + other - shared))
    width = max(len(shared) for shared, _ in counts)
    padded = [[np.pad(each, (0, width - len(each))) for each in pair] for pair in counts]
    return np.array([shared for shared, _ in padded]), np.array([either for _, either in padded])


def make_iou_scorer(shared: Array, either: Array) -> Scorer:
    """Make a scorer of the mean intersection over union, of the classes that are there at all.

    shared, either: pixels of each sample and class, [samples, classes].
    """

    def score(index: Array) -> float:
        intersection, union = shared[index].sum(axis=0), either[index].sum(axis=0)
        there = union > 0
        return float((intersection[there] / union[there]).mean()) if there.any() else 1.0

    return Scorer(score, either.T[either.any(axis=0)])
