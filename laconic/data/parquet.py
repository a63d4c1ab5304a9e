"""Samples in Parquet files, of which a row group is in memory at a time."""

import threading
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laconic.cache import Cache
from laconic.data.array_formats import check_expansion
from laconic.data.stored_rows import KIND, FileVersion, Row, StoredRows
from laconic.errors import DataError
from laconic.hashing import hash_of
from laconic.tasks.row_parsing import RowParsing

ROWS = 1024
"""The most rows that are read at a time."""
LARGEST_GROUP = 2**24
"""Bytes of the columns in a row group, before compression, up to which it is read for one row: 10 ms or so. A file with
larger ones is copied into the cache once, in groups of COPIED_GROUP."""
COPIED_GROUP = 2**20
GROUPS, FILES = 4, 16
"""Row groups and open files that a process keeps."""
BUFFER = 2**20
"""Bytes of a column that are read at a time: otherwise those of a whole row group are."""
LOCK = threading.Lock()
"""Held while a file is read, since pyarrow's files are not for several threads."""
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)


class ParquetRows(StoredRows):
    """The rows of a Parquet file; columns that the task does not use stay on disk, but for `also`.

    Raises DataError for a file that does not read, or that expands to many times its size.
    """

    def __init__(self, path: Path, task: RowParsing, also: Collection[str] = ()) -> None:
        try:
            self.file = FileVersion.read(path)
            schema = pq.read_schema(path)
            if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
                raise DataError(f"{path.name} has several columns {', '.join(map(repr, twice))}. Rename all but one")
            known = (task.field, *task.columns, KIND, *also)
            self._columns = tuple(name for name in schema.names if name in known) or tuple(schema.names)
            # A value that is stored once for many rows stays one value until its row is read.
            self._shared = tuple(name for name in self._columns if is_text(schema.field(name).type))
            metadata = pq.read_metadata(path)
        except UNREADABLE as error:
            raise self._refuse(path, error) from None
        stored = [stored_bytes(metadata.row_group(group), self._columns) for group in range(metadata.num_row_groups)]
        check_expansion(path, sum(stored))
        self._at_once = max(1, min(ROWS, LARGEST_GROUP * metadata.num_rows // max(sum(stored), 1)))
        self._groups = self.file if max(stored, default=0) <= LARGEST_GROUP else self._copy(metadata, sum(stored))
        if self._groups is not self.file:
            metadata = pq.read_metadata(self._groups.path)
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._ends = np.array(list(accumulate(sizes)), np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def __iter__(self) -> Iterator[Row]:
        number = expanded = 0
        try:
            with open_file(self.file.path, self._shared) as file:
                for batch in file.iter_batches(self._at_once, columns=list(self._columns)):
                    for row in zip(*(list_values(batch.column(name)) for name in self._columns), strict=True):
                        number += 1
                        values = dict(zip(self._columns, row, strict=True))
                        expanded += sum(map(count_bytes, values.values()))
                        check_expansion(self.file.path, expanded)
                        yield Row(number, values)
        except UNREADABLE as error:
            raise self._refuse(self.file.path, error) from None

    def read(self, number: int) -> Mapping[str, Any]:
        self._groups.check()
        group = int(np.searchsorted(self._ends, number - 1, side="right"))
        before = int(self._ends[group - 1]) if group else 0
        try:
            with LOCK:
                table = read_group(self._groups, self._columns, self._shared, group)
            return dict(table.slice(number - 1 - before, 1).to_pylist()[0])
        except UNREADABLE as error:
            raise self._refuse(self.file.path, error) from None

    def _copy(self, metadata: pq.FileMetaData, stored: int) -> FileVersion:
        """Copy the columns into the cache in small row groups, unless an earlier run or another rank has done so."""
        path, cache = self.file.path, Cache()
        size = max(1, metadata.num_rows * COPIED_GROUP // stored)
        key = f"parquet-{hash_of(str(path.absolute()), self.file.size, self.file.modified, self._columns, size)}"

        schema = pa.schema([pq.read_schema(path).field(name) for name in self._columns])

        def write(folder: Path) -> None:
            expanded = 0
            with (
                open_file(path, self._shared) as file,
                pq.ParquetWriter(folder / path.name, schema, compression="zstd") as writer,
            ):
                for batch in file.iter_batches(min(size, self._at_once), columns=list(self._columns)):
                    expanded += sum(map(count_expanded, batch.columns))
                    check_expansion(path, expanded)
                    writer.write_batch(batch.cast(schema))

        try:
            with cache.lock(key):
                return FileVersion.read(cache.directory(key, write) / path.name)
        except UNREADABLE as error:
            raise self._refuse(path, error) from None

    @staticmethod
    def _refuse(path: Path, error: Exception) -> DataError:
        return DataError(f"{path.name} does not read as Parquet: {error}")


def open_file(path: Path, shared: Collection[str]) -> pq.ParquetFile:
    """Open a file, whose columns `shared` keep a value that is stored once as one value."""
    return pq.ParquetFile(path, read_dictionary=list(shared), buffer_size=BUFFER)


@lru_cache(FILES)
def keep_file(file: FileVersion, shared: tuple[str, ...]) -> pq.ParquetFile:
    """Open a file and keep it open."""
    return open_file(file.path, shared)


@lru_cache(GROUPS)
def read_group(file: FileVersion, columns: tuple[str, ...], shared: tuple[str, ...], group: int) -> pa.Table:
    """Read some columns of a row group."""
    return keep_file(file, shared).read_row_group(group, columns=list(columns))


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column holds texts or bytes, which a file may store once for many rows."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def list_values(column: pa.Array) -> list[Any]:
    """Return the values of a column. Texts that are stored once for many rows are one object."""
    if not pa.types.is_dictionary(column.type):
        return list(column.to_pylist())
    used = column.indices.unique()
    values = dict(zip(used.to_pylist(), column.dictionary.take(used).to_pylist(), strict=True))
    return [values[index] for index in column.indices.to_pylist()]


def stored_bytes(group: pq.RowGroupMetaData, columns: Collection[str]) -> int:
    """Return the bytes of some columns of a row group before compression, as the file's own metadata gives them."""
    chunks = (group.column(index) for index in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)


def count_expanded(column: pa.Array) -> int:
    """Return the bytes that a column takes where each value is stored by itself."""
    if pa.types.is_dictionary(column.type) and is_text(column.type.value_type):
        return pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0
    return int(column.nbytes)


def count_bytes(value: Any) -> int:
    """Return the bytes that a value takes, near enough for a limit."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(count_bytes, value.values()))
    return sum(map(count_bytes, value)) if isinstance(value, list) else 8
