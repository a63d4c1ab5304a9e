"""Samples in Parquet files."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from laconic.data.array_formats import check_expansion
from laconic.data.rows import KIND, Row
from laconic.errors import DataError
from laconic.tasks.row_parsing import RowParsing

ROWS = 1024
"""Rows in memory at a time."""


def rows(path: Path, task: RowParsing, also: Collection[str] = ()) -> Iterator[Row]:
    """Read the rows of a Parquet file; columns that the task does not use stay on disk, but for `also`.

    Raises DataError for a file that does not read, or that expands to many times its size.
    """
    number = expanded = 0
    try:
        schema = pq.read_schema(path)
        known = (task.field, *task.columns, KIND, *also)
        columns = [name for name in schema.names if name in known] or list(schema.names)
        # A value that is stored once for many rows stays one value until its row is read.
        shared = [name for name in columns if is_text(schema.field(name).type)]
        with pq.ParquetFile(path, read_dictionary=shared) as file:
            check_expansion(path, stored_bytes(file.metadata, columns))
            for batch in file.iter_batches(ROWS, columns=columns):
                for index in range(batch.num_rows):
                    number += 1
                    values = {name: batch.column(name)[index].as_py() for name in columns}
                    expanded += sum(map(count_bytes, values.values()))
                    check_expansion(path, expanded)
                    yield Row(number, values)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path.name} does not read as Parquet: {error}") from None


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column holds texts or bytes, which a file may store once for many rows."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def stored_bytes(metadata: pq.FileMetaData, columns: list[str]) -> int:
    """Return the bytes of some columns before compression, as the file's own metadata gives them."""
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    chunks = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)


def count_bytes(value: Any) -> int:
    """Return the bytes that a value takes, near enough for a limit."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(count_bytes, value.values()))
    return sum(map(count_bytes, value)) if isinstance(value, list) else 8
