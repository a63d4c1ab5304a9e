"""Checks of the values of tensors, which a graph does not hold.

The exporter has no operator for what they leave in the graph. D-FINE compares the sizes of its maps so. Nothing is
lost: what is captured is compared with the module on batches of several sizes.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import torch_compilable_check

NAME = "torch_compilable_check"


def check_shapes_only(condition: Any, *args: Any, **kwargs: Any) -> None:
    """What transformers checks, but for conditions on the values of tensors."""
    if not isinstance(condition, Tensor):
        torch_compilable_check(condition, *args, **kwargs)


@contextmanager
def skipped_checks(module: nn.Module) -> Iterator[None]:
    """Within the context, the modules of Python that define the transformers models inside the module check shapes
    alone."""
    names = {type(each).__module__ for each in module.modules() if isinstance(each, PreTrainedModel)}
    spaces = [vars(sys.modules[name]) for name in sorted(names) if NAME in vars(sys.modules[name])]
    for space in spaces:
        space[NAME] = check_shapes_only
    try:
        yield
    finally:
        for space in spaces:
            space[NAME] = torch_compilable_check
