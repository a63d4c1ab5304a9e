"""Datasets: samples with or without labels, split by a hash of their content, and subsampled."""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

from laconic.arrays import Array
from laconic.errors import DataError
from laconic.hardware import pause_garbage_collection
from laconic.hashing import hash_of
from laconic.tasks.row_parsing import is_file

T = TypeVar("T")


class StoredSample(ABC):
    """A sample that stays in its file, and is read from there at each access."""

    __slots__ = ()

    @abstractmethod
    def read(self) -> Any:
        """Read the sample, as a task's `parse` takes it. Raises DataError where the file is another one by now."""


class StoredSamples(Sequence[StoredSample]):
    """Samples that stay in files, without an object for each."""

    @abstractmethod
    def pick(self, indices: Iterable[int]) -> "StoredSamples":
        """Return the samples at these indices, in this order."""


class Samples(Sequence[Any]):
    """A sequence of samples. Images are decoded, and stored samples read, at every access, so that memory does not grow
    with the dataset."""

    def __init__(self, sources: Sequence[Any], parse: Callable[[Any], Any]) -> None:
        self._sources = sources
        self._parse = parse

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> "Samples": ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Samples(self._sources[index], self._parse)
        source = self._sources[index]
        if isinstance(source, StoredSample):
            return self._parse(source.read())
        return self._parse(source) if is_file(source) else source

    @property
    def sources(self) -> Sequence[Any]:
        """The samples as `parse` takes them: those in files are paths or bytes, perhaps with a target."""
        return [source.read() if isinstance(source, StoredSample) else source for source in self._sources]

    def unparsed(self) -> "Samples":
        """Return the samples as `parse` takes them; stored ones are still read at every access."""
        return Samples(self._sources, return_unchanged)

    def pick(self, indices: Iterable[int]) -> "Samples":
        """Return the samples at these indices, in this order."""
        if isinstance(self._sources, StoredSamples):
            return Samples(self._sources.pick(indices), self._parse)
        return Samples([self._sources[index] for index in indices], self._parse)


def return_unchanged(source: T) -> T:
    """Return a sample as it came."""
    return source


@dataclass(frozen=True, eq=False)
class RowSketch:
    """What is compared of a row with other rows.

    read: digest of the tensors that a model reads of it. rest: digest of its arrays of whole numbers, which near copies
    share. texts: its texts. arrays: a few numbers for each of its arrays of floats, [numbers] float32.
    """

    read: str
    rest: str
    texts: tuple[str, ...]
    arrays: tuple[Array, ...]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples, parsed by their task, with or without labels.

    keys: a digest of each row's content; a row is one sample, or the two samples of a scored pair, which are adjacent
    and share their label. groups: of each row, the key of a row that it is a copy or a near copy of, or its own; empty
    where copies were not looked for. sketches: what is compared of each row to find them. lengths: the length of each
    sample, by `Task.length`. shapes: the shapes of each sample's arrays; samples of different shapes cannot share a
    batch. fingerprint: digest of keys, labels, kinds and the whole file. kinds: the kind of each sample, "" where a row
    names none; empty where no row does. numbers: of each row in its file, from 1. left_out: a sentence about the files
    of its folder that are no samples, "" without any.
    """

    name: str
    samples: Samples
    labels: list[Any] | None
    fingerprint: str
    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    shapes: tuple[Any, ...]
    kinds: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    sketches: tuple[RowSketch, ...] = ()
    numbers: tuple[int, ...] = ()
    left_out: str = ""

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def per_row(self) -> int:
        """Samples per row: 2 for scored pairs."""
        return len(self.samples) // len(self.keys)

    def rows(self, rows: Sequence[int] | Array, name: str) -> "Dataset":
        """Return the dataset of some rows, in the order given. Its fingerprint depends on these rows alone."""
        rows, count = np.asarray(rows, np.int64), self.per_row
        indices = (rows[:, None] * count + np.arange(count)).reshape(-1)
        labels = None if self.labels is None else list(pick(self.labels, indices))
        keys, kinds = pick(self.keys, rows), pick(self.kinds, indices)
        return Dataset(
            name=name,
            samples=self.samples.pick(indices.tolist()),
            labels=labels,
            fingerprint=hash_of(keys, labels, *([kinds] if any(kinds) else [])),
            keys=keys,
            lengths=pick(self.lengths, indices),
            shapes=pick(self.shapes, indices),
            kinds=kinds,
            groups=pick(self.groups, rows),
            sketches=pick(self.sketches, rows),
            numbers=pick(self.numbers, rows),
        )

    def describe_sample(self, index: int) -> str:
        """Say where a sample comes from, as `row 7 of texts.jsonl (judge)`."""
        row = index // self.per_row
        return f"row {self.numbers[row]} of {self.name}" if self.numbers else f"sample {index + 1} of {self.name}"

    @property
    def copies(self) -> tuple[str, ...]:
        """The group of each row; its own key where no copies are known."""
        return self.groups or self.keys

    def without(self, other: "Dataset") -> "Dataset":
        """Return the rows that are no copies of any in `other`. Raises DataError where none is left."""
        seen = set(other.copies)
        left = [row for row, group in enumerate(self.copies) if group not in seen]
        if not left:
            raise DataError(f"{self.name} holds nothing that is not in {other.name} too. Give other samples")
        return self if len(left) == len(self.keys) else self.rows(left, self.name)

    def take(self, count: int, seed: int = 0) -> "Dataset":
        """Return a sample of at most `count` samples, one row of each group of copies, stratified by length.

        The result does not depend on the order of the file.
        """
        unique: dict[str, int] = {}
        for row in sorted(range(len(self.keys)), key=lambda row: self.keys[row]):
            unique.setdefault(self.copies[row], row)
        size = max(1, count // self.per_row)
        cost = {row: sum(self.lengths[row * self.per_row : (row + 1) * self.per_row]) for row in unique.values()}
        ordered = sorted(unique.values(), key=lambda row: (cost[row], shuffle_key(self.keys[row], seed)))
        if size >= len(ordered):
            return self.rows(ordered, self.name)
        # Sorted by length, one row of each of `wanted` intervals of equal size.
        rng = np.random.default_rng(seed)
        edges = np.linspace(0, len(ordered), size + 1).astype(int)
        return self.rows([ordered[rng.integers(a, b)] for a, b in itertools.pairwise(edges)], self.name)


def pick(values: Sequence[T], indices: Array) -> tuple[T, ...]:
    """Return the values at these indices, [picked] int64, in this order; none where there are no values. Of many rows,
    one value and whole numbers take less time than objects that are all over the memory."""
    if not values or all(value is values[0] for value in values):
        return tuple(values[:1]) * len(indices)
    if set(map(type, values)) == {int}:
        numbers: Any = np.array(values)
        if numbers.dtype.kind == "i":
            return tuple(numbers[indices].tolist())
    return tuple(map(values.__getitem__, indices.tolist()))


def shuffle_key(key: str, seed: int) -> str:
    """Return the sort key of a shuffle that depends on the content and the seed alone."""
    return hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()


def shuffle_groups(names: Sequence[str], seed: int) -> tuple[Array, Array]:
    """Sort rows by the shuffle keys of their groups' names; returns them, [rows] int64, and where each group begins and
    the last one ends, [groups + 1] int64."""
    different = dict.fromkeys(names)
    digests = b"".join(hashlib.sha256(f"{seed}:{name}".encode()).digest() for name in different)
    order = sort_digests(digests)
    if len(different) == len(names):
        return order, np.arange(len(names) + 1)
    numbers = {name: number for number, name in enumerate(different)}
    groups = np.fromiter(map(numbers.__getitem__, names), np.int64)
    ranks = np.argsort(order)[groups]
    return np.argsort(ranks, kind="stable"), np.append(0, np.cumsum(np.bincount(ranks)))


def sort_digests(digests: bytes) -> Array:
    """Sort digests of 32 bytes each; returns their places, [digests] int64."""
    parts = np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 4)
    order = np.argsort(parts[:, 0])
    if (np.diff(parts[order, 0]) > 0).all():
        return order
    return np.lexsort(parts.T[::-1])


@pause_garbage_collection()
def split(dataset: Dataset, sizes: Mapping[str, float], seed: int = 0) -> dict[str, Dataset]:
    """Split a dataset into disjoint parts. sizes: the share of each part, by name; their sum is at most 1.

    Rows are assigned by a hash of their content: copies stay together, a pair is never split, and the order of the file
    does not matter. Raises DataError where there are fewer different rows than parts.
    """
    if not sizes or min(sizes.values()) <= 0 or sum(sizes.values()) > 1 + 1e-9:
        raise ValueError(f"shares must be positive and add up to at most 1, not {dict(sizes)}")
    ordered, edges = shuffle_groups(dataset.copies, seed)
    count = len(edges) - 1
    if count < len(sizes):
        raise DataError(
            f"{dataset.name} holds {count} different samples, at least {len(sizes)} are needed: one for each of "
            f"{', '.join(sizes)}"
        )
    parts, start, share = {}, 0, 0.0
    for number, (name, size) in enumerate(sizes.items(), 1):
        share += size
        # At least one for this part, and for each part to come.
        stop = min(max(round(share * count), start + 1), count - (len(sizes) - number))
        rows = ordered[edges[start] : edges[stop]]
        parts[name] = dataset.rows(rows, f"{dataset.name} ({name})")
        start = stop
    return parts
