"""What is known of the rows of a file once they are checked, column by column, since a million objects take seconds to
make; and kept in the cache until the file is another one."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from laconic.cache import Cache
from laconic.data.dataset import RowSketch
from laconic.data.shards import list_shards
from laconic.data.stored_rows import FileVersion, ParsedRow, RowSamples, StoredRows, TaskRows
from laconic.hardware import pause_garbage_collection
from laconic.hashing import environment_digest, hash_of
from laconic.tasks.row_parsing import strip_target
from laconic.tasks.task import Task

FEWEST = 10_000
"""Rows of a file from which on they are kept: fewer are read in about a second."""
LEAST = 2**20
"""Bytes of a dataset from which on its labels are kept."""
T = TypeVar("T")


@dataclass(frozen=True)
class RowColumns:
    """Parsed rows. sources, lengths, shapes: of each sample; labels, keys, numbers, kinds: of each row, as of
    `ParsedRow`. sketches: of each row; empty where they were not asked for. per_row: the numbers of samples that rows
    have."""

    sources: Sequence[Any]
    labels: Sequence[Any]
    keys: Sequence[str]
    numbers: Sequence[int]
    lengths: Sequence[int]
    shapes: Sequence[Any]
    kinds: Sequence[str]
    sketches: Sequence[RowSketch]
    per_row: frozenset[int]

    @classmethod
    def collect(cls, entries: Iterable[ParsedRow], stored: TaskRows | None = None) -> "RowColumns":
        """Collect rows. stored: where their samples stay, and are read from at each access."""
        made: tuple[list[Any], ...] = ([], [], [], [], [], [], [], [])
        sources, labels, keys, numbers, lengths, shapes, kinds, sketches = made
        per_row: set[int] = set()
        for entry in entries:
            per_row.add(len(entry.sources))
            if stored is None:
                sources += entry.sources
            labels.append(entry.label)
            keys.append(entry.key)
            numbers.append(entry.number)
            lengths += entry.lengths
            shapes += entry.shapes
            kinds.append(entry.kind)
            if entry.sketch:
                sketches.append(entry.sketch)
        samples = sources if stored is None else RowSamples.of(stored, numbers, max(per_row, default=1))
        return cls(samples, labels, keys, numbers, lengths, shapes, kinds, sketches, frozenset(per_row))

    @classmethod
    def join(cls, parts: Sequence["RowColumns"]) -> "RowColumns":
        """Join the rows of several files."""
        if len(parts) == 1:
            return parts[0]
        sources = [part.sources for part in parts]
        stored = [samples for samples in sources if isinstance(samples, RowSamples)]
        is_stored = len(stored) == len(sources)
        names = ("labels", "keys", "numbers", "lengths", "shapes", "kinds", "sketches")
        columns = {name: list(chain.from_iterable(getattr(part, name) for part in parts)) for name in names}
        samples = RowSamples.join(stored) if is_stored else list(chain.from_iterable(sources))
        return cls(samples, **columns, per_row=frozenset().union(*(part.per_row for part in parts)))

    def encode(self) -> dict[str, Any]:
        """Return rows of one number of samples, JSON-ready, without the samples."""
        (count,) = self.per_row
        layouts: dict[Any, int] = {}
        starts = range(0, len(self.lengths), count)
        rows = ((tuple(self.lengths[at : at + count]), tuple(self.shapes[at : at + count])) for at in starts)
        return {
            "numbers": self.numbers,
            "keys": self.keys,
            "labels": self.labels,
            "kinds": self.kinds,
            "layout": [layouts.setdefault(row, len(layouts)) for row in rows],
            "layouts": list(layouts),
            "count": count,
        }

    @classmethod
    def decode(cls, content: Mapping[str, Any], stored: TaskRows) -> "RowColumns":
        """Return the rows that `encode` was given, whose samples are read at each access."""
        layouts = [to_tuples(layout) for layout in content["layouts"]]
        count, numbers = content["count"], content["numbers"]
        lengths, shapes = (
            [row[0] for row in map([layout[part] for layout in layouts].__getitem__, content["layout"])]
            if count == 1
            else [value for number in content["layout"] for value in layouts[number][part]]
            for part in (0, 1)
        )
        samples = RowSamples.of(stored, numbers, count)
        labels, keys, kinds = (content[name] for name in ("labels", "keys", "kinds"))
        return cls(samples, labels, keys, numbers, lengths, shapes, kinds, [], frozenset([count]))


def index_rows(
    rows: StoredRows, task: Task, columns: Mapping[str, str], parse: Callable[[], Iterable[ParsedRow]]
) -> RowColumns:
    """Return the rows of a file, which stay there: from the cache where this task has checked them in the same version
    of the file before; else parsed, while other processes wait for them. Rows that name other files are parsed each
    time, since those may change. Raises DataError as `parse` does."""
    stored, names_files = TaskRows(rows, task, columns), False

    def find_files() -> Iterator[ParsedRow]:
        nonlocal names_files
        for entry in parse():
            names_files = names_files or any(isinstance(strip_target(source), Path) for source in entry.sources)
            yield entry

    def collect() -> RowColumns:
        return RowColumns.collect(find_files(), stored)

    def encode(found: RowColumns) -> Any:
        is_kept = len(found.per_row) == 1 and not names_files and all(map(is_plain, found.labels))
        return found.encode() if is_kept else None

    if len(rows) < FEWEST:
        return collect()
    assets = {name: content.decode() for name, content in task.assets().items()}
    key = f"rows-{hash_of(describe_version(rows.file), task.name, assets, columns, environment_digest())}"
    return keep(key, collect, encode, lambda content: RowColumns.decode(content, stored))


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


def keep(key: str, compute: Callable[[], T], encode: Callable[[T], Any], decode: Callable[[Any], T]) -> T:
    """Return what is computed, or what an earlier process computed and kept under a key, while others wait. encode:
    returns something JSON-ready; None for what cannot be kept."""
    cache, computed = Cache(), list[T]()

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


def is_plain(label: Any) -> bool:
    """Return whether JSON gives back a label as it is."""
    if isinstance(label, list):
        return all(map(is_plain, label))
    return label is None or type(label) in (bool, int, float, str)


def to_tuples(value: Any) -> Any:
    """Return nested lists of JSON as tuples."""
    return tuple(map(to_tuples, value)) if isinstance(value, list) else value
