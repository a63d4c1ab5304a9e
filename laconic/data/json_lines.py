"""Samples as lines of JSON, in memory or, where there are many, in their file."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from laconic.arrays import Array
from laconic.data.formats import lines
from laconic.data.row_index import FEWEST
from laconic.data.stored_rows import FileVersion, Row, StoredRows
from laconic.errors import DataError
from laconic.tasks.row_parsing import RowParsing

LEAST = 2**20
"""Bytes of a file from which on its lines are counted."""
BLOCK = 2**24
"""Bytes in which the ends of lines are looked for at a time."""
NEWLINE = ord("\n")


class JsonRows(StoredRows):
    """The lines of a file. Its rows have the numbers of their lines; empty lines are left out."""

    def __init__(self, path: Path, field: str) -> None:
        self.file, self._field = FileVersion.read(path), field
        self._starts = find_lines(path)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[Row]:
        return iterate_rows(self.file.path, self._field)

    def read(self, number: int) -> Mapping[str, Any]:
        self.file.check()
        start, stop = self._starts[number - 1 : number + 1].tolist()
        with self.file.path.open("rb") as file:
            file.seek(start)
            line = file.read(stop - start)
        return parse_line(line.decode("utf-8-sig" if number == 1 else "utf-8"), number, self.file.path, self._field)


def jsonl(path: Path, task: RowParsing, also: Collection[str] = ()) -> Iterable[Row]:
    """Read one JSON object per line; empty lines are left out. The rows of a large file stay there."""
    if path.stat().st_size >= LEAST and len(rows := JsonRows(path, task.field)) >= FEWEST:
        return rows
    return iterate_rows(path, task.field)


def iterate_rows(path: Path, field: str) -> Iterator[Row]:
    """Read the rows of a file in their order. Raises DataError for a line that is no object."""
    for number, line in lines(path):
        if line.strip():
            yield Row(number, parse_line(line, number, path, field))


def parse_line(line: str, number: int, path: Path, field: str) -> dict[str, Any]:
    """Parse a line, whose number is for errors. field: of a sample, as an example. Raises DataError."""
    try:
        values = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path.name}, row {number}: not JSON ({error}). Fix or remove the row") from None
    if not isinstance(values, dict):
        raise DataError(
            f"{path.name}, row {number}: expected an object as {{{field!r}: ...}}, got {type(values).__name__}. Fix or "
            f"remove the row"
        )
    return values


def find_lines(path: Path) -> Array:
    """Find where each line of a file begins, and where the last one ends, [lines + 1] int64 bytes."""
    starts, before = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == NEWLINE) + before + 1)
            before += len(block)
    found = np.concatenate(starts)
    return found if found[-1] == before else np.append(found, before)
