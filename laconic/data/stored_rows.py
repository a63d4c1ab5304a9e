"""Rows of files; and files whose rows stay there, and are read at each access: memory does not grow with contents."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from laconic.arrays import Array
from laconic.data.dataset import RowSketch, StoredSample, StoredSamples
from laconic.errors import DataError, InputError
from laconic.tasks.row_parsing import RowParsing

KIND = "kind"
"""The column of a sample's kind, as "licences": the verdict tells kinds apart."""


@dataclass(frozen=True)
class Row:
    """One row of a file: its number, from 1, and its values by column."""

    number: int
    values: Mapping[str, Any]


def rename_columns(row: Row, columns: Mapping[str, str], path: Path) -> Row:
    """Return the row with the task's names of columns; `outer.inner` is a value of a nested column. Raises DataError
    for a column that it lacks."""
    values = dict(row.values)
    for name, column in columns.items():
        outer, _, inner = column.partition(".")
        if column in values:
            values[name] = values.pop(column)
        elif isinstance(values.get(outer), Mapping) and inner in values[outer]:
            values[name] = values[outer][inner]
        elif name not in values:
            raise DataError(
                f"{path.name}, row {row.number}: there is no column {column!r} for {name!r}. The columns are "
                f"{', '.join(map(repr, row.values))}"
            )
    return Row(row.number, values)


class ParsedRow(NamedTuple):
    """A row that was parsed and checked.

    number: in its file, from 1. sources: of each sample, the image file it is decoded from, or else the sample itself.
    key: digest of the content, 32 hexadecimal digits. sketch: what is compared of the row with others, where that was
    asked for. lengths, shapes: of each sample. kind: of the sample, or "".
    """

    number: int
    sources: tuple[Any, ...]
    label: Any
    key: str
    sketch: RowSketch | None
    lengths: tuple[int, ...]
    shapes: tuple[Any, ...]
    kind: str = ""


@dataclass(frozen=True)
class FileVersion:
    """A file as it was when its rows were indexed: its path, its bytes, and when it was last modified, in ns."""

    path: Path
    size: int
    modified: int

    @classmethod
    def read(cls, path: Path) -> "FileVersion":
        """Read the version that a file has now. Raises OSError."""
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """Raise DataError where the file is another one by now, so that its index is wrong."""
        try:
            is_same = FileVersion.read(self.path) == self
        except OSError:
            is_same = False
        if not is_same:
            raise DataError(f"{self.path} has changed since it was read. Start again")


class StoredRows(ABC):
    """The rows of a file, of which any one can be read. Worker processes get a copy, so it holds no open file."""

    file: FileVersion

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def __iter__(self) -> Iterator[Row]:
        """Read all rows in their order, a few at a time. Raises DataError."""

    @abstractmethod
    def read(self, number: int) -> Mapping[str, Any]:
        """Read the values of a row, by its number from 1. Raises DataError."""


@dataclass(frozen=True)
class TaskRows:
    """Stored rows as a task reads them. columns: by the task's name of a column, the name that the file has for it."""

    rows: StoredRows
    task: RowParsing
    columns: Mapping[str, str]

    def read_samples(self, number: int) -> tuple[Any, ...]:
        """Read the samples of a row as `task.parse` takes them. Raises DataError."""
        path = self.rows.file.path
        row = rename_columns(Row(number, self.rows.read(number)), self.columns, path)
        try:
            return self.task.read_row(row.values, path.parent)[0]
        except InputError as error:
            raise DataError(f"{path.name}, row {number}: {error}") from None


@dataclass(frozen=True, slots=True)
class RowSample(StoredSample):
    """A sample of a stored row. place: of the sample in its row, from 0."""

    rows: TaskRows
    number: int
    place: int

    def read(self) -> Any:
        return self.rows.read_samples(self.number)[self.place]


class RowSamples(StoredSamples):
    """Samples of stored rows, of several files. places: of each sample the number of its file, that of its row, from 1,
    and its place in the row, from 0; [3, samples] int64."""

    def __init__(self, files: Sequence[TaskRows], places: Array) -> None:
        self._files, self._places = tuple(files), places

    def __len__(self) -> int:
        return int(self._places.shape[1])

    @overload
    def __getitem__(self, index: int) -> RowSample: ...

    @overload
    def __getitem__(self, index: slice) -> "RowSamples": ...

    def __getitem__(self, index: int | slice) -> "RowSample | RowSamples":
        if isinstance(index, slice):
            return RowSamples(self._files, self._places[:, index])
        file, number, place = self._places[:, index].tolist()
        return RowSample(self._files[file], number, place)

    def pick(self, indices: Iterable[int]) -> "RowSamples":
        return RowSamples(self._files, self._places[:, np.fromiter(indices, np.int64)])

    @classmethod
    def of(cls, file: TaskRows, numbers: Sequence[int], per_row: int) -> "RowSamples":
        """Make the samples of the rows of a file with these numbers."""
        rows = np.repeat(np.array(numbers, np.int64), per_row)
        return cls([file], np.stack([np.zeros_like(rows), rows, np.arange(len(rows)) % per_row]))

    @classmethod
    def join(cls, parts: Iterable["RowSamples"]) -> "RowSamples":
        """Join the samples of several files."""
        files: list[TaskRows] = []
        places: list[Array] = []
        for part in parts:
            places.append(part._places + np.array([[len(files)], [0], [0]]))
            files += part._files
        return cls(files, np.concatenate(places, axis=1))
