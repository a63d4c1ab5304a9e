"""The inputs of a plain module, from samples in .npz: names, dtypes and sizes from the file, free axes by runs."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from laconic.arrays import Array, Arrays
from laconic.errors import SourceError, did_you_mean
from laconic.models.signature import call
from laconic.tasks.row_parsing import LABEL
from laconic.tensor import BATCH, TensorSpec

ROWS = (2, 5)
"""The batch sizes of the runs that the batch must be free in."""

FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    SourceError,
)
"""What a module raises for inputs that it does not take."""

Axis = tuple[str, int]
"""An input's name, and the number of one of its axes."""


def infer_inputs(module: nn.Module, samples: Arrays) -> tuple[TensorSpec, ...]:
    """Return the inputs that a module takes, from samples in arrays that are named as the parameters of its forward.

    An axis is free if the module runs with another size of it: alone, or together with the axes of other inputs that
    have the same size, which then are one axis. Raises SourceError where the names or the counts of samples do not fit,
    or the module does not run on the samples in batches of other sizes.
    """
    arrays = {name: array for name, array in samples.items() if name != LABEL}
    check_names(module, arrays)
    check_rows(arrays)
    for rows in ROWS:
        if failure := run(module, take_rows(arrays, rows)):
            double = [name for name, array in arrays.items() if array.dtype == np.float64]
            hint = f" ({', '.join(double)}: with .astype('float32'))" if double else ""
            raise SourceError(
                f"the module does not run on {rows} of the samples: {failure}. Save arrays with the samples "
                f"along axis 0, as its forward takes them{hint}, or give `inputs` in the recipe"
            )
    few = take_rows(arrays, ROWS[0])
    free: dict[Axis, tuple[str, tuple[int, int]]] = {}
    for axes in group_axes(few):
        # An axis that only gets shorter alone, as a list of targets beside one of sources, may belong with the other.
        if any(axis in free and free[axis][1][1] > size_of(few, axis) for axis in axes):
            continue
        bounds = find_bounds(module, few, axes)
        if bounds and (not any(axis in free for axis in axes) or bounds[1] > size_of(few, axes[0])):
            free |= dict.fromkeys(axes, (f"{axes[0][0]}_{axes[0][1]}", bounds))
    return tuple(describe(name, array, free) for name, array in arrays.items())


def check_rows(arrays: Arrays) -> None:
    """Raise SourceError unless all arrays hold numbers, and as many samples along axis 0."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise SourceError(f"the array {name!r} of the samples holds {array.dtype.name}, expected numbers")
        if not array.ndim or not len(array):
            raise SourceError(
                f"the array {name!r} of the samples has the shape {list(array.shape)}, expected the samples along "
                f"axis 0. Save it with numpy.savez({name}=...), as many rows as there are samples"
            )
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        held = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise SourceError(f"the arrays hold different counts of samples ({held}), expected one along axis 0 of each")


def check_names(module: nn.Module, arrays: Arrays) -> None:
    """Raise SourceError unless the arrays are parameters of the module's forward, with all that have no default."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(each.kind == each.VAR_POSITIONAL for each in parameters):
        return  # in the order of the file
    known = [each.name for each in parameters if each.kind != each.VAR_KEYWORD]
    for name in arrays:
        if name not in known and not any(each.kind == each.VAR_KEYWORD for each in parameters):
            raise SourceError(
                f"the samples hold {name!r}, and forward takes {', '.join(known)}. {did_you_mean(name, known)}"
            )
    missing = [
        each.name
        for each in parameters
        if each.name not in arrays and each.default is each.empty and each.kind != each.VAR_KEYWORD
    ]
    if missing:
        raise SourceError(f"the samples lack {', '.join(missing)}, which forward takes. Save an array for each")


def group_axes(arrays: Arrays) -> Iterator[tuple[Axis, ...]]:
    """Return each axis but the batch by itself, and then the axes of the same size together, where there are
    several."""
    sizes: dict[int, list[Axis]] = {}
    for name, array in arrays.items():
        for axis in range(1, array.ndim):
            sizes.setdefault(array.shape[axis], []).append((name, axis))
    yield from ((axis,) for axes in sizes.values() for axis in axes)
    yield from (tuple(axes) for axes in sizes.values() if len(axes) > 1)


def find_bounds(module: nn.Module, arrays: Arrays, axes: tuple[Axis, ...]) -> tuple[int, int] | None:
    """Find the smallest and the largest size of these axes that the module is known to run with; None if it runs with
    none but that of the samples."""
    (name, axis), *_ = axes
    size = arrays[name].shape[axis]

    def runs(other: int) -> bool:
        return other > 0 and run(module, resize(arrays, axes, other)) is None

    if size < 3 or not runs(size - 1):
        return None
    half = size // 2
    return (half if runs(half) else size - 1), (2 * size if runs(2 * size) else size)


def size_of(arrays: Arrays, axis: Axis) -> int:
    """Return the size of an axis."""
    name, number = axis
    return int(arrays[name].shape[number])


def resize(arrays: Arrays, axes: tuple[Axis, ...], size: int) -> Arrays:
    """Resize arrays along some axes: cut them, or repeat them from the start."""
    changed = dict(arrays)
    for name, axis in axes:
        array = changed[name]
        changed[name] = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
    return changed


def take_few(samples: Arrays) -> Arrays:
    """Take the samples that the free axes were found with: a module that takes their sizes may refuse made-up values,
    as of lengths."""
    return take_rows({name: array for name, array in samples.items() if name != LABEL}, ROWS[0])


def take_rows(arrays: Arrays, rows: int) -> Arrays:
    """Take the first samples, repeated where there are fewer."""
    return {name: np.take(array, np.arange(rows) % max(len(array), 1), axis=0) for name, array in arrays.items()}


def run(module: nn.Module, arrays: Arrays) -> str | None:
    """Run the module; returns what failed, or None."""
    try:
        with torch.inference_mode():
            call(module, {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})
    except FAILURES as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def describe(name: str, array: Array, free: Mapping[Axis, tuple[str, tuple[int, int]]]) -> TensorSpec:
    """Return the spec of one input. free: by axis, its name and its bounds."""
    shape: list[Any] = [BATCH]
    bounds = {}
    for axis in range(1, array.ndim):
        if (name, axis) in free:
            called, limits = free[name, axis]
            bounds[called] = limits
            shape.append(called)
        else:
            shape.append(array.shape[axis])
    return TensorSpec(name=name, dtype=array.dtype.name, shape=tuple(shape), bounds=bounds)
