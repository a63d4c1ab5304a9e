"""Checks of the values of tensors, which a graph does not hold.

transformers checks some arguments with `torch._check_tensor_all` while a model is traced, and the exporter has no
operator for what that leaves in the graph. D-FINE compares the sizes of its maps so. What is captured has been checked,
since it is compared with the module on batches of several sizes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def skip_check(cond: Any, message: Any = None) -> None:
    """Take the place of `torch._check_tensor_all`."""


@contextmanager
def skipped_checks() -> Iterator[None]:
    """Within the context, the values of tensors are not checked."""
    check = torch._check_tensor_all
    torch._check_tensor_all = skip_check
    try:
        yield
    finally:
        torch._check_tensor_all = check
