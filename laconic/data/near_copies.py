"""Groups of rows that are copies of one another, or nearly: they are not split, and count as one observation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from datasketch import MinHash, MinHashLSH

from laconic.arrays import Array
from laconic.data.dataset import Dataset, RowSketch

PIECE = 8
"""Bytes of a piece of text; texts are compared by the pieces that they share."""
SHARED = 0.8
"""The share of all pieces of two texts that near copies have in common (Jaccard's index): a text of 90 letters keeps it
with one letter changed, and loses it with another word."""
CANDIDATE, PERMUTATIONS = 0.6, 64
"""The index value from which on the hash tables find most pairs, which are then compared, and the hashes of a text."""
NEAR = 0.06
"""The root mean square of the differences between the sketches of two arrays, in standard deviations, up to which they
are near copies: images of noise that were saved as JPEG of quality 85 differ by up to 0.053, no two handwritten digits
by less than 0.12."""
FEWEST_NUMBERS = 6
"""Where the sketches of arrays vary in fewer directions, they are copies only where they are equal: of few numbers, any
two rows may be close. In six, one pair in forty million of normal vectors is as near; of 2,000 rows there are two
million pairs. Handwritten digits vary in 19."""
SVD_ROWS = 1000
"""Rows that the direction of the largest variance is found from."""


def group_near_copies(*datasets: Dataset) -> list[Dataset]:
    """Group the rows of several datasets: copies by what the model reads, and near copies by their sketches.

    Texts are compared without regard to case, spaces and punctuation. The groups do not depend on the order of rows.
    """
    pairs = [pair for dataset in datasets for pair in zip(dataset.keys, dataset.sketches, strict=True)]
    sketches = dict(sorted(pairs, key=lambda pair: pair[0]))
    readers: dict[str, str] = {}
    groups = {key: readers.setdefault(sketch.read, key) for key, sketch in sketches.items()}
    alone = {key: sketches[key] for key in readers.values()}
    texts = {key: sketch.texts for key, sketch in alone.items() if sketch.texts}
    arrays = {key: sketch for key, sketch in alone.items() if not sketch.texts}
    leaders = dict([*lead_texts(texts), *lead_arrays(arrays)])
    groups = {key: leaders.get(group, group) for key, group in groups.items()}
    return [replace(dataset, groups=tuple(groups[key] for key in dataset.keys)) for dataset in datasets]


def lead_texts(rows: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield each row that is a near copy of an earlier one, with that one. rows: texts by key."""
    index, empty = MinHashLSH(threshold=CANDIDATE, num_perm=PERMUTATIONS), MinHash(PERMUTATIONS, hashfunc=int)
    pieces: dict[str, list[frozenset[int]]] = {}
    for key, texts in rows.items():
        cut = [cut_pieces(text) for text in texts]
        signature = empty.copy()
        signature.update_batch([piece ^ number for number, part in enumerate(cut) for piece in part])
        leader = next((other for other in sorted(index.query(signature)) if are_near(cut, pieces[other])), None)
        if leader is not None:
            yield key, leader
        else:
            index.insert(key, signature)
            pieces[key] = cut


def cut_pieces(text: str) -> frozenset[int]:
    """Return the pieces of a text without case, spaces and punctuation, as numbers of 32 bits; the whole of a short
    one."""
    letters = "".join(letter for letter in text.casefold() if letter.isalnum()) or text
    content = np.frombuffer(letters.encode().ljust(PIECE, b"\0"), np.uint8)
    windows = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(content, PIECE)).view(np.uint64).ravel()
    return frozenset((windows * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)).tolist())


def are_near(one: Sequence[frozenset[int]], other: Sequence[frozenset[int]]) -> bool:
    """Return whether each text of a row shares most pieces with that of another row."""
    return len(one) == len(other) and all(len(a & b) >= SHARED * len(a | b) for a, b in zip(one, other, strict=True))


def lead_arrays(rows: Mapping[str, RowSketch]) -> Iterator[tuple[str, str]]:
    """Yield each row that is a near copy of an earlier one, with that one. rows: sketches of arrays, by key."""
    by_size: dict[tuple[int, ...], list[str]] = {}
    for key, sketch in rows.items():
        if sketch.arrays:
            by_size.setdefault(tuple(map(len, sketch.arrays)), []).append(key)
    for keys in by_size.values():
        numbers = np.array([np.concatenate(rows[key].arrays) for key in keys], np.float64)
        spread = numbers.std(axis=0)
        points = (numbers - numbers.mean(axis=0))[:, spread > 0] / spread[spread > 0]
        sizes, axes = np.linalg.svd(points[:: max(len(points) // SVD_ROWS, 1)], full_matrices=False)[1:]
        if count_directions(sizes) < FEWEST_NUMBERS:
            continue
        by_rest: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            by_rest.setdefault(rows[key].rest, []).append(place)
        for places in by_rest.values():
            for point, leader in lead_points(points[places], axes[0]):
                yield keys[places[point]], keys[places[leader]]


def count_directions(sizes: Array) -> float:
    """Estimate how many directions hold the variance of points: the participation ratio. sizes: their singular
    values."""
    variances = np.square(sizes)
    return float(variances.sum() ** 2 / np.square(variances).sum()) if variances.any() else 0.0


def lead_points(points: Array, axis: Array) -> Iterator[tuple[int, int]]:
    """Yield each point that is near one that leads others, with that one. points: [points, numbers], of variance 1.

    axis: [numbers], the direction of the largest variance; only points that are near in it are compared.
    """
    radius = NEAR * points.shape[1] ** 0.5
    along = points @ axis
    leaders: list[int] = []
    start = 0
    for point in np.argsort(along, kind="stable").tolist():
        while start < len(leaders) and along[point] - along[leaders[start]] > radius:
            start += 1
        near = np.array(leaders[start:], np.int64)
        distances = np.linalg.norm(points[near] - points[point], axis=1)
        if near.size and distances.min() <= radius:
            yield point, int(near[distances.argmin()])
        else:
            leaders.append(point)
