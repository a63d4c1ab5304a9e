"""Lengths of tensors that stay free in a graph.

`len` of a tensor is always a number of Python, so the axis that it reads would be captured as fixed, though
`tensor.shape[0]` would not. RT-DETR reads the size of its batch so.
"""

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def measure_length(value: Any) -> Any:
    """What `len` gives; of a tensor the size of its first axis, which may be a free one."""
    return value.shape[0] if isinstance(value, Tensor) else builtins.len(value)


@contextmanager
def free_lengths(module: nn.Module) -> Iterator[None]:
    """Within the context, `len` in the modules of Python that define the transformers models inside the module leaves
    free axes free."""
    names = {type(each).__module__ for each in module.modules() if isinstance(each, PreTrainedModel)}
    spaces = [vars(sys.modules[name]) for name in sorted(names) if "len" not in vars(sys.modules[name])]
    for space in spaces:
        space["len"] = measure_length
    try:
        yield
    finally:
        for space in spaces:
            del space["len"]
