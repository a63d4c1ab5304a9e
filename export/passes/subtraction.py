"""Integers that are subtracted from a fraction, as a mask of padding in `1.0 - mask`.

torch's exporter decomposes it to a subtraction whose first argument is no tensor, and finds no operator for that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def float_subtraction() -> Iterator[None]:
    """Within the context, integers are converted to the default dtype before they are subtracted from a fraction, which
    is the dtype that torch gives the difference."""
    subtract_from: Any = Tensor.__rsub__

    def convert_and_subtract(tensor: Tensor, number: Any) -> Any:
        is_mixed = isinstance(number, float) and not (tensor.is_floating_point() or tensor.is_complex())
        return subtract_from(tensor.to(torch.get_default_dtype()) if is_mixed else tensor, number)

    Tensor.__rsub__ = convert_and_subtract  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.__rsub__ = subtract_from  # type: ignore[method-assign]
