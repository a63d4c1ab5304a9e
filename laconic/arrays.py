"""NumPy arrays of any type and shape, alone and by the name of their tensor, stacks of them, and what logits become."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = dict[str, Array]


def stack_padded(rows: Sequence[Array]) -> Array:
    """Stack arrays of one rank, smaller ones padded with zeros at the end of each axis."""
    shape = tuple(max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True))
    stacked = np.zeros((len(rows), *shape), rows[0].dtype)
    for number, row in enumerate(rows):
        places: tuple[int | slice, ...] = (number, *map(slice, row.shape))
        stacked[places] = row
    return stacked


def softmax(logits: Array) -> Array:
    """Compute the softmax over the last axis, float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    exponents = np.exp(shifted)
    return np.asarray(exponents / exponents.sum(axis=-1, keepdims=True))


def sigmoid(logits: Array) -> Array:
    """Compute the logistic function of each number, without overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)))


def first(arrays: Arrays) -> Array:
    """Return the first output, which answers and metrics are computed from."""
    return next(iter(arrays.values()))
