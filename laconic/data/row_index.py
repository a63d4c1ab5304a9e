"""What is known of the rows of a file once they are checked, kept in the cache until the file is another one."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from laconic.cache import Cache
from laconic.data.shards import list_shards
from laconic.data.stored_rows import FileVersion, ParsedRow, StoredRows, TaskRows, leave_in_file, make_sources
from laconic.hardware import pause_garbage_collection
from laconic.hashing import environment_digest, hash_of
from laconic.tasks.row_parsing import strip_target
from laconic.tasks.task import Task

FEWEST = 10_000
"""Rows of a file from which on they are kept: fewer are read in about a second."""
LEAST = 2**20
"""Bytes of a dataset from which on its labels are kept."""
T = TypeVar("T")


def index_rows(
    rows: StoredRows, task: Task, columns: Mapping[str, str], parse: Callable[[], Iterable[ParsedRow]]
) -> list[ParsedRow]:
    """Return the rows of a file, which stay there: from the cache where this task has checked them in the same version
    of the file before; else parsed, while other processes wait for them. Rows that name other files are parsed each
    time, since those may change. Raises DataError as `parse` does."""
    stored, names_files = TaskRows(rows, task, columns), False

    def leave() -> list[ParsedRow]:
        nonlocal names_files
        entries = []
        for entry in parse():
            names_files = names_files or any(isinstance(strip_target(source), Path) for source in entry.sources)
            entries.append(leave_in_file(entry, stored))
        return entries

    def encode(entries: list[ParsedRow]) -> Any:
        return None if names_files else encode_rows(entries)

    if len(rows) < FEWEST:
        return leave()
    assets = {name: content.decode() for name, content in task.assets().items()}
    key = f"rows-{hash_of(describe_version(rows.file), task.name, assets, columns, environment_digest())}"
    return keep(key, leave, encode, lambda content: list(decode_rows(content, stored)))


def keep_labels(path: Path, task: Task, columns: Mapping[str, str], read: Callable[[], list[Any]]) -> list[Any]:
    """Return the distinct labels of a dataset, in any order: from the cache where the same versions of its files have
    been read before. read: reads all. Raises what it raises."""
    files = [FileVersion.read(shard) for shard in list_shards(path) if shard.is_file()]
    if sum(file.size for file in files) < LEAST:
        return read()
    key = f"labels-{hash_of(list(map(describe_version, files)), task.name, columns, environment_digest())}"
    return keep(key, lambda: list_distinct(read()), lambda labels: labels if all(map(is_plain, labels)) else None, list)


def list_distinct(labels: Iterable[Any]) -> list[Any]:
    """List each of the labels that JSON gives back as they are once, and all others."""
    return list({json.dumps(label) if is_plain(label) else place: label for place, label in enumerate(labels)}.values())


def keep(
    key: str, compute: Callable[[], list[T]], encode: Callable[[list[T]], Any], decode: Callable[[Any], list[T]]
) -> list[T]:
    """Return what is computed, or what an earlier process computed and kept under a key, while others wait. encode:
    returns something JSON-ready; None for what cannot be kept."""
    cache, computed = Cache(), list[list[T]]()

    def compute_once() -> Any:
        computed.append(compute())
        return encode(computed[0])

    try:
        with cache.lock(key):
            content = cache.json(key, compute_once)
    except OSError:  # a cache that cannot be written to; what cannot be read is said by `compute`
        content = None
    if computed:
        return computed[0]
    if content is None:
        return compute()
    with pause_garbage_collection():
        return decode(content)


def describe_version(file: FileVersion) -> list[Any]:
    """Describe a version of a file for the key of what is known of it."""
    return [str(file.path.absolute()), file.size, file.modified]


def encode_rows(entries: list[ParsedRow]) -> dict[str, Any] | None:
    """Return rows as columns, JSON-ready; None for rows whose labels are arrays."""
    if not all(is_plain(entry.label) for entry in entries):
        return None
    layouts: dict[Any, int] = {}
    return {
        "numbers": [entry.number for entry in entries],
        "keys": [entry.key for entry in entries],
        "labels": [entry.label for entry in entries],
        "kinds": [entry.kind for entry in entries],
        "layout": [layouts.setdefault((entry.lengths, entry.shapes), len(layouts)) for entry in entries],
        "layouts": list(layouts),
    }


def decode_rows(content: Mapping[str, Any], stored: TaskRows) -> Iterator[ParsedRow]:
    """Yield the rows that `encode_rows` was given, without their samples."""
    layouts = [to_tuples(layout) for layout in content["layouts"]]
    columns = (content[name] for name in ("numbers", "keys", "labels", "kinds", "layout"))
    for number, key, label, kind, layout in zip(*columns, strict=True):
        lengths, shapes = layouts[layout]
        yield ParsedRow(number, make_sources(stored, number, len(lengths)), label, key, None, lengths, shapes, kind)


def is_plain(label: Any) -> bool:
    """Return whether JSON gives back a label as it is."""
    if isinstance(label, list):
        return all(map(is_plain, label))
    return label is None or type(label) in (bool, int, float, str)


def to_tuples(value: Any) -> Any:
    """Return nested lists of JSON as tuples."""
    return tuple(map(to_tuples, value)) if isinstance(value, list) else value
