"""NumPy arrays of any type and shape, alone and by the name of their tensor, and stacks of them."""

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
