"""The interface of an ONNX file: which axis of each input is the batch, what is free, and what has one value for all.

Files follow many conventions: a batch of one, sizes written as -1, states whose batch is the second axis, a sampling
rate beside the recording. Laconic puts the batch first. The adapted model computes what the file computes, by the same
nodes, between inputs and outputs whose axes were moved.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from export.capture.source_file import HALVES
from laconic.arrays import Array, Arrays
from laconic.errors import SourceError
from laconic.tensor import BATCH, DTYPES, TensorSpec

UNNAMED = (None, "", "?")
"""Names of free axes that are none: the same one twice does not mean the same size."""
BATCH_NAME = re.compile(r"n|b|bs|batch|batch_?size|batch_.*|.*_batch", re.IGNORECASE)
"""Names that exporters give the batch axis."""

DIRECTION = re.compile(
    r"(?:^|_)(?:in|out|new|next|prev|init|initial|old|past|present|final|n|0)(?=_|$)|(?<=[a-z])N$|(?<=^[hc])[0n]$"
)
"""The part of a state's name that tells the input from the output."""
STATE = re.compile(r"^[hc]x?$|state|hidden|cell|cache|memory|context|buffer|lstm|gru|rnn", re.IGNORECASE)
"""Names of states."""

Axis = int | str | None
"""The size of an axis, or its name; None for a free axis without a name."""


@dataclass(frozen=True)
class InputLayout:
    """How one input of a file is fed. axes: as the file has them. place: which of them is the batch. constant: its
    value for all samples, where it is no input of a sample. bounds: of free axes, by the recipe."""

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    place: int = 0
    constant: Array | None = None
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether the file takes the input as a sample has it."""
        return self.constant is None and self.place == 0

    @property
    def has_fixed_batch(self) -> bool:
        """Whether the batch is fixed to one row."""
        return self.constant is None and self.axes[self.place] == 1


def name_inputs(layouts: Sequence[InputLayout], *, shared: bool) -> tuple[TensorSpec, ...]:
    """Return the specs of inputs with the batch first. shared: whether axes without a name have one size in all inputs
    at the same place."""
    batches = {each.axes[each.place] for each in layouts} - {None, 1}
    specs = []
    for layout in layouts:
        shape: list[int | str] = [BATCH]
        for place, axis in enumerate(layout.axes):
            if place != layout.place:
                name = axis or (f"axis_{place}" if shared else f"{layout.name}_{place}")
                shape.append(BATCH if name in batches else name)
        bounds = {axis: limits for axis, limits in layout.bounds.items() if axis in shape}
        specs.append(TensorSpec(name=layout.name, dtype=layout.dtype, shape=tuple(shape), bounds=bounds))
    return tuple(specs)


def infer_layouts(
    model: ir.Model,
    path: Path,
    *,
    specs: Sequence[TensorSpec] = (),
    constants: Mapping[str, Any] = {},
    rows: Mapping[str, Sequence[Array]] = {},
    only: str = "",
) -> tuple[InputLayout, ...]:
    """Infer how each input of a file is fed, or that of one name.

    specs: of inputs, from the recipe, in the order of the file's axes, with the batch named so. constants: values of
    inputs, from the recipe. rows: arrays of some samples, by input. only: a name; empty for all inputs.

    Raises SourceError for an input that is no tensor of numbers, or has no axis for the batch and no value.
    """
    initialized = model.graph.initializers
    values = [value for value in model.graph.inputs if value.name not in initialized]
    named = {spec.name: spec for spec in specs}
    names = [str(value.name) for value in values]
    for kind, keys in (("inputs", named), ("constants", constants)):
        if unknown := sorted(set(keys) - set(names)):
            raise SourceError(f"{kind}: {path} has no input {unknown[0]!r}. Its inputs are {', '.join(names)}")
    axes = {str(value.name): read_axes(value, path) for value in values}
    for name, spec in named.items():
        if len(spec.shape) != len(axes[name]):
            raise SourceError(
                f"inputs: {name!r} has {len(axes[name])} axes in {path}, and the recipe names {spec.shape}"
            )
        axes[name] = tuple(spec.shape)
    firsts: set[Axis] = {each[0] for each in axes.values() if each and isinstance(each[0], str)}
    layouts = (
        infer_layout(str(value.name), read_dtype(value, path), axes[str(value.name)], firsts, constants, rows, path)
        for value in values
        if only in ("", value.name)
    )
    return tuple(replace(each, bounds=named[each.name].bounds) if each.name in named else each for each in layouts)


def find_states(model: ir.Model) -> dict[str, str]:
    """Find the inputs of a streaming model that hold a state, with the outputs that hold it after the step, by their
    names."""

    def find_stem(value: ir.Value) -> tuple[str, int]:
        return DIRECTION.sub("", str(value.name)).strip("_"), -1 if value.shape is None else len(value.shape)

    outputs = {find_stem(value): str(value.name) for value in model.graph.outputs}
    stems = {str(value.name): find_stem(value) for value in model.graph.inputs}
    return {name: outputs[stem] for name, stem in stems.items() if stem in outputs and STATE.search(stem[0])}


def read_axes(value: ir.Value, path: Path) -> tuple[Axis, ...]:
    """Read the axes of an input; -1 and 0 stand for free ones. Raises SourceError for one of unknown rank."""
    if value.shape is None:
        raise SourceError(f"input {value.name!r} of {path} is not a tensor of numbers with a known rank")
    return tuple(
        (size if size > 0 else None) if isinstance(size, int) else None if size.value in UNNAMED else size.value
        for size in value.shape
    )


def read_dtype(value: ir.Value, path: Path) -> str:
    """Return the dtype in which an input is given: that of the file, but for BF16, which numpy lacks, and FP16, FP32.

    Raises SourceError for what is no number."""
    if value.dtype in HALVES:
        return "float32"
    dtype = "none" if value.dtype is None else np.dtype(value.dtype.numpy()).name
    if dtype not in DTYPES:
        kind = "of text, which no engine here takes" if value.dtype == ir.DataType.STRING else f"of type {value.dtype}"
        raise SourceError(f"input {value.name!r} of {path} is {kind}; expected a tensor of numbers or truth values")
    return dtype


def infer_layout(
    name: str,
    dtype: str,
    axes: tuple[Axis, ...],
    firsts: set[Axis],
    constants: Mapping[str, Any],
    rows: Mapping[str, Sequence[Array]],
    path: Path,
) -> InputLayout:
    """Infer how one input is fed. firsts: names of first axes of all inputs. Raises SourceError."""
    if name in constants:
        return InputLayout(name, dtype, axes, constant=read_constant(name, dtype, axes, constants[name], path))
    samples = rows.get(name, ())
    place = find_batch_axis(axes, firsts, samples)
    if place is not None:
        return InputLayout(name, dtype, axes, place)
    if samples and fits(samples[0].shape, axes) and all(np.array_equal(samples[0], each) for each in samples):
        return InputLayout(name, dtype, axes, constant=samples[0].astype(dtype))
    shape = [str(axis or "?") for axis in axes]
    if not axes:
        raise SourceError(
            f"input {name!r} of {path} is a single number without an axis for the batch. Give the value that it has "
            f"for all samples, in the recipe: constants: {{{name}: 1}}"
        )
    raise SourceError(
        f"input {name!r} of {path} has shape {shape}: no axis is free or 1, which a dynamic batch needs. If its value "
        f"is the same for all samples, give it in the recipe (constants: {{{name}: ...}}); else export the model with "
        f"a dynamic batch"
    )


def read_constant(name: str, dtype: str, axes: tuple[Axis, ...], value: Any, path: Path) -> Array:
    """Return the value of a constant input as an array of its shape. Raises SourceError where it does not fit."""
    try:
        array = np.asarray(value, dtype)
    except (TypeError, ValueError):
        raise SourceError(f"constants: {value!r} is no {dtype}, which input {name!r} of {path} takes") from None
    if array.ndim < len(axes) and array.size == 1:
        array = array.reshape((1,) * len(axes))
    if not fits(array.shape, axes):
        shape = [str(axis or "?") for axis in axes]
        raise SourceError(f"constants: {name!r} has shape {list(array.shape)}, and {path} takes {shape}")
    return array


def find_batch_axis(axes: Sequence[Axis], firsts: set[Axis], samples: Sequence[Array]) -> int | None:
    """Find the axis of the batch: one that is named so, else the first, else a free one, else one of size 1; of those
    without which the samples fit. None where there is none."""
    places: Sequence[int] = range(len(axes))
    if samples:
        places = [place for place in places if fits(samples[0].shape, (*axes[:place], *axes[place + 1 :]))] or places
        if fits(samples[0].shape, axes):  # each sample has the whole tensor
            return None

    def rank(place: int) -> int:
        axis = axes[place]
        if isinstance(axis, int) and axis != 1:
            return 6
        if isinstance(axis, str) and (axis == BATCH or BATCH_NAME.fullmatch(axis)):
            return 0 if axis == BATCH else 1
        if axis in firsts:
            return 2
        return 3 if place == 0 else 4 if axis != 1 else 5

    best = min(places, key=lambda place: (rank(place), place), default=None)
    return None if best is None or rank(best) == 6 else best


def fits(shape: Sequence[int], axes: Sequence[Axis]) -> bool:
    """Return whether an array of this shape has these axes."""
    return len(shape) == len(axes) and all(
        not isinstance(axis, int) or axis == size for axis, size in zip(axes, shape, strict=True)
    )


def stack_rows(samples: Sequence[Arrays], sizes: Mapping[str, int], specs: Sequence[TensorSpec]) -> Arrays:
    """Return a batch of the given sizes of free axes, made of samples: their values are repeated or cut off.

    samples: inputs of one row each, [1, ...] by name.
    """
    batch: Arrays = {}
    for spec in specs:
        rows = [samples[row % len(samples)][spec.name][0] for row in range(sizes[BATCH])]
        shape = [axis if isinstance(axis, int) else sizes[axis] for axis in spec.shape[1:]]
        batch[spec.name] = np.stack([resize(row, shape) for row in rows])
    return batch


def resize(array: Array, shape: Sequence[int]) -> Array:
    """Repeat an array along its axes, or cut it off, to a shape."""
    for axis, size in enumerate(shape):
        if array.shape[axis] != size:
            array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
    return array
