"""The classes that a model tells apart: their names in files, and what the labels of samples say of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from laconic.errors import DataError
from laconic.tasks.assets import LABELS, read_asset, to_json
from laconic.tasks.checkpoint_loading import reads_waveforms
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.task import Task
from laconic.tasks.text import TextTask
from laconic.tensor import TensorSpec

SPARSE = 10
"""Numeric labels whose highest is at least so many times their count are names, not indices of classes."""


class LabelledTask(Task):
    """Mixin of tasks whose classes have names, which the artifact holds."""

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        return super().from_preprocessing(preprocessing).with_labels(preprocessing.labels)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        task = super().from_assets(folder, inputs)
        return task.with_labels([str(label) for label in read_asset(folder, LABELS)])

    def assets(self) -> dict[str, bytes]:
        return super().assets() | {LABELS: to_json(list(self.labels))}  # type: ignore[safe-super]  # not alone


def find_class(label: Any, labels: Sequence[str]) -> int:
    """Find the number of a class given by its name or its number. labels: the names; empty where any number will do.

    A number, as a string or not, is the name of a class wherever the names are numbers: 1 is the first of "1" to "5",
    and 0 is none of them. "01" is no number. Raises DataError for a label that is no class.
    """
    name = str(label)
    if name in labels:
        return labels.index(name)
    named = bool(labels) and all(map(is_number, labels))
    if named or not is_number(name) or name.startswith("-") or (labels and int(name) >= len(labels)):
        raise DataError(f"label {label!r} is none of the model's classes: {', '.join(labels[:20])}")
    return int(name)


def is_number(name: str) -> bool:
    """Return whether a name is a whole number as Python writes it, without leading zeros."""
    return re.fullmatch(r"0|-?[1-9][0-9]*", name) is not None


def are_known(labels: Iterable[Any], known: Sequence[str]) -> bool:
    """Return whether each label is a class of a model that has these."""
    try:
        return len(known) > 1 and all(find_class(label, known) >= 0 for label in labels)
    except DataError:
        return False


def check_names(labels: Iterable[Any]) -> None:
    """Raise DataError for a label that is neither the name nor the number of a class."""
    for label in labels:
        if not isinstance(label, (str, int)):
            raise DataError(f"label {label!r} is no class; expected a name, or a whole number")


def class_names(labels: Iterable[Any]) -> tuple[str, ...]:
    """Return the classes of a new head: the sorted names, or one class for each number from 0 to the highest, or from 1
    where that is the lowest, unless the numbers are few and far between, or negative.

    Raises DataError for names mixed with numbers, and for fewer than two classes.
    """
    labels = list(labels)
    names = {str(label) for label in labels}
    numbers = [isinstance(label, int) and not isinstance(label, bool) for label in labels]
    if any(numbers) and not all(numbers):
        raise DataError(f"labels are names or numbers, not both: {', '.join(sorted(names)[:20])}")
    if len(names) < 2:
        raise DataError(f"all samples have the label {''.join(names)!r}, so there is nothing to tell apart")
    if not all(map(is_number, names)):
        return tuple(sorted(names))
    lowest, *_, highest = sorted(map(int, names))
    if lowest < 0 or highest >= SPARSE * len(names):
        return tuple(sorted(names, key=int))
    return tuple(map(str, range(1 if lowest == 1 else 0, highest + 1)))


class LabelledText(LabelledTask, TextTask):
    """A text task whose classes have names, which the artifact holds."""

    has_class_head = True

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        return not reads_waveforms(config) and cls.fits(config)
