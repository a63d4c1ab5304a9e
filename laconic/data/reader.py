"""Reading datasets: from a file or a folder, or from samples in memory, each parsed and checked by the task."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from laconic import registry
from laconic.data.dataset import Dataset, Samples
from laconic.data.row_index import RowColumns, index_rows
from laconic.data.rows import digest_content, parse_row
from laconic.data.shards import list_shards
from laconic.data.stored_rows import ParsedRow, Row, StoredRows, TaskRows, rename_columns
from laconic.errors import DataError, did_you_mean
from laconic.hardware import cores, pause_garbage_collection
from laconic.hashing import hash_of
from laconic.tasks.row_parsing import LABEL, is_file
from laconic.tasks.task import Task

FEW = 64
"""Samples that tell the sizes of a model's inputs."""
LISTED = 5
"""Names of files that are listed where there are more."""
AT_ONCE = 8
"""Rows for each core that are decoded at a time: more would be in memory together."""


def read(path: Path, task: Task, columns: Mapping[str, str] | None = None, *, sketched: bool = False) -> Dataset:
    """Read and check every sample of a file, a folder, or the files that a pattern names; the suffix gives the format.

    A folder may hold images, or the shards of one dataset, all in one format. Samples in Parquet files and tar archives
    stay there, and are read again at each access.

    columns: by the task's name of a column, the name that the file has for it. sketched: whether rows are sketched, so
    that near copies can be found. Raises DataError, naming the row, for the first one that does not fit; MissingPackage
    where a format needs one.
    """
    path = Path(path)
    parts: list[RowColumns] = []
    shards = list_shards(path)
    with nullcontext() if task.decodes_files else pause_garbage_collection():  # what decodes files may leave cycles
        for shard in shards:
            rows = read_rows(shard, task, columns)
            parse = partial(parse_rows, rows, task, columns or {}, shard, sketched=sketched)
            if isinstance(rows, StoredRows) and not sketched:
                parts.append(index_rows(rows, task, columns or {}, parse))
            else:
                stored = TaskRows(rows, task, columns or {}) if isinstance(rows, StoredRows) else None
                parts.append(RowColumns.collect(parse(), stored))
    dataset = join_rows(
        RowColumns.join(parts), task, path.name, file=None if path.is_dir() or shards != [path] else path
    )
    has_files = path.is_dir() and shards == [path]
    return replace(dataset, left_out=describe_left_out(path, dataset)) if has_files else dataset


def parse_rows(
    rows: Iterable[Row], task: Task, columns: Mapping[str, str], path: Path, *, sketched: bool
) -> Iterator[ParsedRow]:
    """Parse and check rows in their order, in a thread for each core where that helps. Raises DataError."""
    check = partial(parse_row, task=task, path=path, sketched=sketched)
    renamed = (rename_columns(row, columns, path) for row in rows)
    if not task.decodes_files:
        yield from map(check, renamed)
        return
    with ThreadPoolExecutor(cores()) as pool:
        while some := list(itertools.islice(renamed, AT_ONCE * cores())):
            yield from pool.map(check, some)


def describe_left_out(path: Path, dataset: Dataset) -> str:
    """Say how many files of a folder, hidden ones excepted, are no samples; "" where all are, or hold rows."""
    sources = set(dataset.samples.sources if is_file(dataset.samples.sources[0]) else ())
    files = [file for file in path.rglob("*") if file.is_file()] if sources else []
    names = sorted(
        str(file.relative_to(path))
        for file in files
        if file not in sources and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not names:
        return ""
    listed = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    return f"{len(names)} of {len(names) + len(sources)} files in {path.name} are no samples and are left out: {listed}"


def read_few(path: Path, task: Task, columns: Mapping[str, str] | None = None, count: int = FEW) -> list[Any]:
    """Read and parse the first samples of a file or a folder. Raises DataError as `read` does."""
    rows = itertools.islice(read_values(path, task, columns), count)
    entries = [parse_row(row, task, shard) for shard, row in rows]
    return [task.parse(source) if is_file(source) else source for entry in entries for source in entry.sources]


def read_rows(path: Path, task: Task, columns: Mapping[str, str] | None = None) -> Iterable[Row]:
    """Read the rows of a file or a folder of samples, unparsed; StoredRows where they can be read again one by one.
    columns: those whose names in the file differ from the task's.

    Raises DataError, MissingPackage.
    """
    if not path.exists():
        near = [entry.name for entry in path.parent.glob("[!.]*")] if path.parent.is_dir() else []
        raise DataError(f"there is no {path}. {did_you_mean(path.name, near[:1000]) if near else ''}".rstrip())
    kind = "folder" if path.is_dir() else path.suffix.lower()
    if kind not in registry.FORMATS:
        raise DataError(f"{path.name} is of an unknown format {kind!r}. {did_you_mean(kind, registry.FORMATS)}")
    also = tuple(name for column in (columns or {}).values() for name in (column, column.partition(".")[0]))
    rows: Iterable[Row] = registry.resolve("format", kind)(path, task, also)
    return rows


def read_values(path: Path, task: Task, columns: Mapping[str, str] | None = None) -> Iterator[tuple[Path, Row]]:
    """Read the rows of all files of a dataset, unparsed, each with its file. Raises DataError as `read` does."""
    for shard in list_shards(Path(path)):
        for row in read_rows(shard, task, columns):
            yield shard, rename_columns(row, columns or {}, shard)


def make_dataset(samples: Iterable[Any], task: Task, *, labels: Sequence[Any] | None = None, name: str = "") -> Dataset:
    """Make a dataset of samples in memory, in any form that `task.parse` takes. Raises DataError as `read` does."""
    values = list(samples)
    if labels is not None and len(labels) != len(values):
        raise DataError(f"{len(labels)} labels for {len(values)} samples")
    rows = (
        Row(number, {task.field: value} | ({} if labels is None else {LABEL: labels[number - 1]}))
        for number, value in enumerate(values, 1)
    )
    return join_rows(RowColumns.collect(parse_row(row, task, Path(name)) for row in rows), task, name)


def find_shapes(labels: Sequence[Any]) -> set[tuple[int, ...]]:
    """Find the shapes of labels: that of numbers and names without NumPy, which takes long for many rows."""
    if set(map(type, labels)) <= {int, str, type(None)}:
        return {()}
    return {() if label is None or isinstance(label, (int, str)) else np.shape(label) for label in labels}


def repeat_values(values: Sequence[Any], count: int) -> list[Any]:
    """Return each value `count` times."""
    return list(values) if count == 1 else [value for value in values for _ in range(count)]


@pause_garbage_collection()
def join_rows(rows: RowColumns, task: Task, name: str, file: Path | None = None) -> Dataset:
    """Make a dataset of parsed rows. Raises DataError for rows that do not go together, as pairs with single texts."""
    if not rows.keys:
        raise DataError(f"{name} holds no samples")
    if len(rows.per_row) > 1:
        raise DataError(f"{name} holds both pairs of texts and single texts. Put them into two files")
    labelled = [label is not None for label in rows.labels]
    if any(labelled) and not all(labelled):
        raise DataError(
            f"{name}: {labelled.count(False)} of {len(labelled)} samples have no label, the first of them is sample "
            f"{labelled.index(False) + 1}. Label all of them, or none"
        )
    shapes = find_shapes(rows.labels) if task.labels_alike else set()
    if len(shapes) > 1:
        raise DataError(f"{name}: labels must be of one shape, not {sorted(shapes)}")
    (count,) = rows.per_row
    labels = repeat_values(rows.labels, count) if all(labelled) else None
    whole = digest_content(file).hex() if file else ""
    return Dataset(
        name=name,
        samples=Samples(rows.sources, task.parse),
        labels=labels,
        fingerprint=hash_of(whole, rows.keys, labels),
        keys=tuple(rows.keys),
        sketches=tuple(rows.sketches),
        numbers=tuple(rows.numbers),
        lengths=tuple(rows.lengths),
        shapes=tuple(rows.shapes),
        kinds=tuple(repeat_values(rows.kinds, count)) if any(rows.kinds) else (),
    )
