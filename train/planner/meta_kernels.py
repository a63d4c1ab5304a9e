"""Frequent operations on fake tensors, computed by torch's meta kernels alone.

`FakeTensorMode` looks each call up in a cache, whose key takes several times as long to make as the kernel takes to
run. The kernels give the same shapes, strides and aliases. Like simulate.py, this file uses private names of torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

ATEN = torch.ops.aten

IN_PLACE = frozenset({ATEN.add_.Tensor, ATEN.copy_.default, ATEN.div_.Tensor, ATEN.mul_.Tensor})
"""Operations that change no more than the values of their first argument, and return it."""

PURE = frozenset(
    {
        ATEN.amax.default,
        ATEN.detach.default,
        ATEN.mm.default,
        ATEN.slice.Tensor,
        ATEN.sum.dim_IntList,
        ATEN.t.default,
        ATEN.transpose.int,
        ATEN.unsqueeze.default,
        ATEN.view.default,
        ATEN._unsafe_view.default,
    }
)
"""Operations with one output, new or a view, on the device of their arguments. Others, as `mul`, have meta kernels in
Python, which take longer than the cache."""

CPU = torch.device("cpu")


def run_operation(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation, as by `func(*args, **kwargs)` in a FakeTensorMode or without one."""
    if func in PURE or func in IN_PLACE:
        mode = find_mode((*args, *kwargs.values()))
        if mode is not None:
            if func in IN_PLACE:
                return args[0]
            with in_kernel_invocation_manager(mode):
                out = func(*args, **kwargs)
            return FakeTensor(mode, out, CPU)
    return func(*args, **kwargs)


def find_mode(values: Iterable[Any]) -> FakeTensorMode | None:
    """Find the mode of the tensors among the values; None unless all are fake, on the CPU, and without a value."""
    mode = None
    for value in values:
        if isinstance(value, Tensor):
            if type(value) is not FakeTensor or value.constant is not None or value.fake_device != CPU:
                return None
            mode = value.fake_mode
    return mode
