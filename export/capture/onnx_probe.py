"""The signature of an ONNX file, found by running it: sizes and values come from the samples, where there are any."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from export.capture.onnx_adapter import OutputLayout
from export.capture.onnx_interface import InputLayout, name_inputs, stack_rows
from laconic.arrays import Arrays
from laconic.errors import RuntimeFailure, SourceError
from laconic.models.signature import ROWS, Sample, probe, probe_sizes
from laconic.tensor import ANY_SIZE, BATCH, TensorSpec, sample_inputs

LEASTS = (3, 32, 224)
"""Sizes to try for free axes where there are no samples: most networks do not run on images of three pixels."""
PARITY_SAMPLES = 8
"""The most samples on which the graph is compared with the file when it is imported."""

ONE_ROW = (1, 1)
Run = Callable[[Arrays], Arrays]
Sizes = dict[str, int]


@dataclass(frozen=True)
class Signature:
    """What was found by running a model. inputs, outputs: with the batch first, without outputs that depend on no
    sample. layouts: how the outputs of the file are read. batches: inputs that the model takes, of several sizes."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layouts: tuple[OutputLayout, ...]
    batches: tuple[Arrays, ...]


def find_signature(
    run: Run, layouts: Sequence[InputLayout], samples: Sequence[Arrays], path: Path, *, one_row: bool = False
) -> Signature:
    """Find the signature of a model by running it.

    layouts: of the inputs that samples have. samples: some, [1, ...] by input; where there are none, sizes and values
    are made up. one_row: whether the model takes a batch of one row alone. Raises SourceError where it does not run.
    """
    rows = ONE_ROW if one_row else ROWS
    if samples:
        return probe_samples(run, layouts, samples, path, rows)
    failure: RuntimeFailure | None = None
    for shared in (True, False):
        inputs = name_inputs(layouts, shared=shared)
        for least in LEASTS:
            ends = tuple({**probe_sizes(inputs, end, least=least), BATCH: rows[end]} for end in range(2))
            try:
                outputs = probe(run, inputs, sizes=ends)
            except RuntimeFailure as error:
                failure = failure or error
            else:
                batches = tuple(sample_inputs(inputs, sizes, seed) for seed, sizes in enumerate(ends))
                return make_signature(inputs, outputs, batches, one_row=one_row)
    advice = "Give --data: its samples tell the sizes that fit"
    raise SourceError(describe_failure(path, inputs, failure, advice))


def describe_failure(path: Path, inputs: Sequence[TensorSpec], failure: BaseException | None, advice: str) -> str:
    """The sentence for a file that does not run."""
    described = ", ".join(f"{spec.name} {spec.dtype} {spec.describe()}" for spec in inputs)
    reason = str(failure).splitlines()[0][:300] if failure else ""
    return f"{path} does not run on batches of its inputs {described}: {reason}. {advice}"


def probe_samples(
    run: Run, layouts: Sequence[InputLayout], samples: Sequence[Arrays], path: Path, rows: tuple[int, int]
) -> Signature:
    """Find the signature by samples. An axis is free below or above the sizes that they have only where the model runs
    there too: a network that needs multiples of 32 is given no others."""
    inputs = name_inputs(layouts, shared=True)
    if any(read_sizes(inputs, sample) is None for sample in samples):
        inputs = name_inputs(layouts, shared=False)
    seen = [read_sizes(inputs, sample) or {} for sample in samples]
    make = partial(stack_rows, samples, specs=inputs)
    try:
        run(make({**seen[0], BATCH: rows[0]}))
    except RuntimeFailure as error:
        advice = "Look whether the samples are prepared as the model needs them"
        raise SourceError(describe_failure(path, inputs, error, advice)) from error
    ranges = {
        axis: find_range(run, make, {**seen[0], BATCH: rows[0]}, axis, [sizes[axis] for sizes in seen], limits)
        for axis, limits in list_free_axes(inputs)
    }
    ends = tuple({BATCH: rows[end], **{axis: one.probed[end] for axis, one in ranges.items()}} for end in range(2))
    inputs = tuple(bound_axes(spec, ranges) for spec in inputs)
    make = partial(stack_rows, samples, specs=inputs)
    try:
        outputs = probe(run, inputs, make, sizes=ends)
    except RuntimeFailure as error:
        advice = "Give samples of one size, or the bounds of its axes in the recipe (inputs)"
        raise SourceError(describe_failure(path, inputs, error, advice)) from error
    batches = (*samples[:PARITY_SAMPLES], *(make(sizes) for sizes in ends))
    return make_signature(inputs, outputs, batches, one_row=rows == ONE_ROW)


def read_sizes(inputs: Sequence[TensorSpec], sample: Arrays) -> Sizes | None:
    """Read the sizes of the free axes of a sample, without the batch; None where one axis has two sizes."""
    sizes: Sizes = {}
    for spec in inputs:
        for axis, size in zip(spec.shape[1:], sample[spec.name].shape[1:], strict=True):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                return None
    return sizes


def list_free_axes(inputs: Sequence[TensorSpec]) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Yield the free axes but for the batch, each with its bounds where the recipe gives any."""
    for axis in dict.fromkeys(
        axis for spec in inputs for axis in spec.shape if isinstance(axis, str) and axis != BATCH
    ):
        yield axis, next((spec.bounds[axis] for spec in inputs if axis in spec.bounds), None)


class AxisRange(NamedTuple):
    """The sizes that an axis may have. low, high: its bounds; None where there is none. probed: two sizes at which the
    model ran, different where it can be."""

    low: int | None
    high: int | None
    probed: tuple[int, int]


def find_range(
    run: Run, make: Sample, base: Sizes, axis: str, seen: Sequence[int], limits: tuple[int, int] | None
) -> AxisRange:
    """Find in which range an axis is free: beyond the sizes that samples have only where the model runs, and answers
    with numbers, at about half the least and at about twice the largest of them.

    base: sizes of all axes of one sample. limits: by the recipe, which then count.
    """
    least, most = min(seen), max(seen)
    if limits:
        return AxisRange(*limits, (limits[0] if least == most else least, most))
    # Odd sizes, and another one for each axis: of axes of one size, either could stand for the other.
    place = [*base].index(axis)
    small, large = (least // 2 + 2 * place) | 1, 2 * most + 2 * place + 1
    is_free_below = 1 < small < least and answers(run, make, {**base, axis: small})
    is_free_above = answers(run, make, {**base, axis: large})
    low, high = (None if is_free_below else least), (None if is_free_above else most)
    if least <= 2 and is_free_above:
        low = None
    return AxisRange(low, high, (small if is_free_below else least, large if is_free_above else most))


def answers(run: Run, make: Sample, sizes: Sizes) -> bool:
    """Return whether a model runs on a batch of these sizes, and answers with numbers."""
    try:
        outputs = run(make(sizes))
    except RuntimeFailure:
        return False
    return all(not np.isnan(array).any() for array in outputs.values() if array.dtype.kind == "f")


def bound_axes(spec: TensorSpec, ranges: Mapping[str, AxisRange]) -> TensorSpec:
    """Return the spec with the bounds of its axes; one that has a single size is fixed."""
    shape: list[int | str] = []
    bounds: dict[str, tuple[int, int]] = {}
    for axis in spec.shape:
        if isinstance(axis, int) or axis not in ranges:
            shape.append(axis)
            continue
        low, high, _ = ranges[axis]
        fixed = low is not None and low == high
        shape.append(low if fixed and low is not None else axis)
        if not fixed and (low is not None or high is not None):
            bounds[axis] = (low or 1, high or ANY_SIZE[1])
    return TensorSpec(name=spec.name, dtype=spec.dtype, shape=tuple(shape), bounds=bounds)


def make_signature(
    inputs: tuple[TensorSpec, ...], outputs: Sequence[TensorSpec], batches: tuple[Arrays, ...], *, one_row: bool
) -> Signature:
    """Make a signature of the specs of outputs as the file has them: the batch is put first."""
    layouts = tuple(find_output_layout(spec, one_row=one_row) for spec in outputs)
    moved = []
    for spec, layout in zip(outputs, layouts, strict=True):
        if layout.place is not None:
            others = [axis for place, axis in enumerate(spec.shape) if place != layout.place]
            moved.append(spec.model_copy(update={"shape": (BATCH, *others)}))
    return Signature(inputs, tuple(moved), layouts, batches)


def find_output_layout(spec: TensorSpec, *, one_row: bool) -> OutputLayout:
    """Find the axis of the batch in an output, as the file has it."""
    wanted: int | str = 1 if one_row else BATCH
    place = spec.shape.index(wanted) if wanted in spec.shape else -1 if one_row else None
    return OutputLayout(spec.name, len(spec.shape), place)
