"""Operations on fake tensors: frequent ones, computed by torch's meta kernels alone, and one that these lack.

`FakeTensorMode` looks each call up in a cache, whose key takes several times as long to make as the kernel takes to
run. The kernels give the same shapes, strides and aliases. Like simulate.py, this file uses private names of torch.
"""

from collections.abc import Iterable, Mapping, Sequence
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

GROUPED = ATEN._grouped_mm.default
CPU = torch.device("cpu")


class ShapeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode of fake tensors that knows products of groups, as of mixtures of experts, in FP32: torch's meta kernel
    takes BF16 alone, where the processor's takes both (2.13)."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is GROUPED:
            return multiply_groups(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def multiply_groups(
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Make the output of a product of groups, without values.

    left: [rows, inner], or [groups, rows, inner]. right: [groups, inner, columns], or [inner, columns]. A matrix among
    them has the groups one after the other, up to `offsets`, [groups]: along its rows or columns, or, where both are
    matrices, along what is summed over, which gives [groups, rows, columns].
    """
    rows, columns = left.shape[-2], right.shape[-1]
    groups = left.shape[0] if offsets is None else offsets.shape[0]
    shape = (groups, rows, columns) if left.dim() == right.dim() else (rows, columns)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


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
