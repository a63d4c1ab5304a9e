"""Rows of files to samples and labels."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.tasks.named_task import NamedTask

LABEL = "label"
"""The column of a sample's label."""
PAIR = ("text1", "text2")
"""The columns of the two texts of a pair."""
SCORE = "score"
"""The column that says how alike the texts of a pair are."""
SampleKind = Literal["texts", "images", "audio", "arrays"]
"""What a file of samples can hold."""


class RowParsing(NamedTask):
    """How the rows of files become samples and labels."""

    columns: ClassVar[tuple[str, ...]] = (LABEL,)
    """The further columns that a row of a file may have, beside `field`."""

    accepts: ClassVar[frozenset[SampleKind]] = frozenset()
    """The kinds of sample that the task reads from files which hold one kind only: .txt, .npz, folders of images."""

    decodes_files: ClassVar[bool] = False
    """Whether `parse` decodes files outside the interpreter lock, so that threads help."""

    labels_alike: ClassVar[bool] = True
    """Whether the labels of all samples must be of one shape."""

    labels: tuple[str, ...] = ()
    """The names of the classes; empty where they have none."""

    constants: Mapping[str, Any] = {}
    """Values of inputs that the source takes and that are the same for all samples: rows may repeat them."""

    sample_rows: Mapping[str, Array] = {}
    """A few samples by input, [rows, ...], that a model of plain arrays is tried on; empty where there are none."""

    def with_labels(self, labels: Sequence[str]) -> Self:
        """Return the same task for a model with other classes."""
        task = copy.copy(self)
        task.labels = tuple(labels)
        return task

    def label(self, index: int) -> str:
        """Return the name of a class, or its number where it has no name."""
        return self.labels[index] if index < len(self.labels) else str(index)

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read the samples of a row of a file in `folder`, as `parse` takes them, and its label or None.

        One sample; two where the row is a pair of samples that are compared with each other. Raises InputError.
        """
        if self.field not in values:
            raise InputError(
                f"there is no {self.field!r} among the columns {', '.join(map(repr, values))}. Name the one that holds "
                f"it: --column {self.field}=NAME"
            )
        return (self.read_field(values[self.field], folder),), values.get(LABEL)

    def read_field(self, value: Any, folder: Path) -> Any:
        """Return what `parse` takes, from the field of a row of a file in `folder`. Raises InputError."""
        return value

    def from_arrays(self, arrays: Arrays) -> Any:
        """Return what `parse` takes, from the arrays of one sample by input."""
        return arrays

    def drop_constants(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays of a sample without inputs that are constants. Raises InputError for another value."""
        for name in self.constants.keys() & arrays.keys():
            if not np.array_equal(arrays[name], self.constants[name]):
                raise InputError(f"input {name!r} is {arrays[name]}, and {self.constants[name]} in all other samples")
        return {name: array for name, array in arrays.items() if name not in self.constants}

    def parse_label(self, value: Any, sample: Any) -> Any:
        """Parse the label of a parsed sample from a row's value. Raises InputError or DataError for one that `scorer`
        cannot use."""
        return value

    def has_target(self, sample: Any) -> bool:
        """Return whether a sample says what a model is to write for it, where the model reads that too."""
        return True

    def with_answers(self, samples: Sequence[Any], written: Array) -> list[Any]:
        """Return the samples with the answers of a model as their targets. written: [samples, tokens] int64, padded."""
        return list(samples)


def is_pair(values: Mapping[str, Any]) -> bool:
    """Return whether a row has the two columns of a pair."""
    return all(name in values for name in PAIR)


def read_pair(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the two texts of a row. Raises InputError for anything else than strings."""
    for name in PAIR:
        if not isinstance(values[name], str):
            raise InputError(f"expected a string under {name!r}, got {type(values[name]).__name__}")
    return tuple(values[name] for name in PAIR)


@dataclass(frozen=True, eq=False)
class Targeted:
    """A sample with its target. sample: as a task's `parse` takes it, or as it returns it. target: the ids of the
    tokens to write, the end token included. name: of the sample's file."""

    sample: Any
    target: tuple[int, ...]
    name: str = ""

    def __str__(self) -> str:
        return self.name or "a recording"


def strip_target(sample: Any) -> Any:
    """Return the sample itself, without its target if it has one."""
    return sample.sample if isinstance(sample, Targeted) else sample


def is_file(source: Any) -> bool:
    """Return whether a sample is the path or the content of a file that is decoded at each access, with or without
    target."""
    return isinstance(strip_target(source), (Path, bytes))
