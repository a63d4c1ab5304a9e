"""Samples in Parquet files."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from laconic.data.rows import LABEL, Row
from laconic.errors import DataError
from laconic.tasks.task import PAIR, Task

ROWS = 1024
"""Rows in memory at a time."""


def rows(path: Path, task: Task) -> Iterator[Row]:
    """Read the rows of a Parquet file; columns that the task does not use stay on disk."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            wanted = (task.field, LABEL, *PAIR)
            columns = [name for name in file.schema_arrow.names if name in wanted] or None
            for batch in file.iter_batches(ROWS, columns=columns):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, values)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path.name} does not read as Parquet: {error}") from None
