"""The objects in an image as files of samples have them: in the form of answers, or in that of COCO's data sets."""

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.errors import DataError
from laconic.tasks.classes import find_class

OBJECTS = "objects"
"""The column of the objects of an image in data sets that were made from COCO's form."""
SIDES = ("xmin", "ymin", "xmax", "ymax")
FORM = "{'label': 'cat', 'box': {'xmin': 10, 'ymin': 20, 'xmax': 50, 'ymax': 90}}, in pixels of the image"


def check_list(value: Any) -> Sequence[Any]:
    """The objects of an image. Raises DataError for anything but a list."""
    if not isinstance(value, (list, tuple)):
        raise DataError(f"a label must be a list of objects {FORM}; not {value!r}")
    return value


def read_object(value: Any, labels: Sequence[str], width: int, height: int) -> list[float]:
    """The number of an object's class, and the left, top, right and bottom of its box as shares of the image's sides.

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
    """Objects in the form of answers, from lists under `bbox` (left, top, width and height, in pixels) and `category`
    (numbers or names of classes). Crowds (`iscrowd`) are left out. Raises DataError.
    """
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
    """Whether something is a list of four numbers."""
    numbers = isinstance(sides, (list, tuple)) and all(isinstance(side, (int, float)) for side in sides)
    return numbers and len(sides) == 4 and not any(isinstance(side, bool) for side in sides)
