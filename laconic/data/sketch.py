"""Sketches of rows: what a model reads of them, and what near copies share."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from laconic.arrays import Array
from laconic.data.dataset import RowSketch
from laconic.hashing import digest_arrays, hash_of
from laconic.tasks.processing import Processing
from laconic.tasks.row_parsing import strip_target

CELLS = 8
"""The most cells along each of the last two axes of an array, whose means stand for it."""
BLOCKS = 64
"""The most blocks of an array of one axis, whose means and magnitudes stand for it."""


def sketch_row(task: Processing, samples: Sequence[Any]) -> RowSketch:
    """Sketch a row of one sample or of two that are compared with each other. samples: parsed."""
    tensors = [task.encode_request(strip_target(sample)) for sample in samples]
    parts = [part for sample in samples for part in list_parts(strip_target(sample))]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    return RowSketch(
        read=hash_of([digest_arrays(each) for each in tensors]),
        rest=digest_arrays({str(place): array for place, array in enumerate(arrays) if array.dtype.kind != "f"}),
        texts=tuple(part for part in parts if isinstance(part, str)),
        arrays=tuple(reduce_array(array) for array in arrays if array.dtype.kind == "f"),
    )


def list_parts(sample: Any) -> list[Any]:
    """The texts and arrays of a sample."""
    if isinstance(sample, Mapping):
        return [sample[name] for name in sorted(sample)]
    return [str(part) for part in sample] if isinstance(sample, (tuple, list)) else [sample]


def reduce_array(array: Array) -> Array:
    """The numbers that stand for an array: the means of cells of its last two axes; of one axis the means and the
    magnitudes of blocks. Returns [numbers] float32."""
    if array.ndim < 2:
        blocks = np.array_split(array.ravel(), min(BLOCKS, max(array.size, 1)))
        means = [block.mean() for block in blocks]
        return np.array(
            [*means, *(np.abs(block).mean() for block in blocks)] if array.size > BLOCKS else means, np.float32
        )
    planes = array.reshape(-1, *array.shape[-2:])[:CELLS]
    for axis in (1, 2):
        size = planes.shape[axis]
        edges = np.linspace(0, size, min(size, CELLS) + 1).astype(int)
        widths = np.diff(edges).reshape([-1 if place == axis else 1 for place in range(3)])
        planes = np.add.reduceat(planes, edges[:-1], axis=axis, dtype=np.float32) / widths
    return planes.ravel().astype(np.float32)
