"""The layout of a batch: requests are joined and padded to one batch, and outputs split again."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.tensor import BATCH, TensorSpec

Sizes = dict[str, int]
"""The size of each free axis, by name."""

PADDING = 0.1
"""The largest share of padding in a batch of requests of different sizes. MiniLM in BF16 by OpenVINO, texts of 4 to 256
tokens: rows per CPU-second are the same for any share from 0.05 to 0.17, and 1.2 to 1.5 times those of batches that are
filled in the order of arrival, a quarter to a third of which is padding."""

FINENESS = 8
"""Free axes are rounded up to so many sizes between a power of two and the next: 40 sizes up to 256. An engine keeps
code and memory for each shape that it has met, OpenVINO 0.6 MB for MiniLM. The texts above are padded by 4 % for it;
with multiples of 16, short texts were padded by 15 %."""


class Part(NamedTuple):
    """Rows that go through one batch together: a request, or a part of one."""

    inputs: Arrays
    rows: int
    sizes: Sizes

    @property
    def cells(self) -> int:
        """Rows times the product of the free axes, roughly proportional to the cost."""
        return self.rows * math.prod(self.sizes.values())


@dataclass(frozen=True)
class Cap:
    """The largest batch. rows: for free axes as long as when the artifact was measured. cells: rows times the product
    of the free axes; where these are shorter, a batch may have more rows, up to as many cells."""

    rows: int
    cells: int = 0

    def rows_at(self, sizes: Sizes) -> int:
        """Return the most rows for these sizes of the free axes."""
        return max(self.rows, self.cells // max(1, math.prod(sizes.values())))


class Batch:
    """A batch while its parts are collected."""

    def __init__(self, layout: "Layout", cap: Cap) -> None:
        self.layout = layout
        self.cap = cap
        self.parts: list[Part] = []
        self.rows = 0
        self.cells = 0
        self.sizes: Sizes = {}

    @property
    def full(self) -> bool:
        """Whether no further row fits."""
        return bool(self.parts) and self.rows >= self.cap.rows_at(self.sizes)

    def add(self, part: Part) -> bool:
        """Add the part if it fits with the others, and return whether it did. The first always fits."""
        rows, sizes = self.rows + part.rows, part.sizes
        if self.parts:
            if sizes != self.sizes:
                sizes = {axis: max(size, sizes[axis]) for axis, size in self.sizes.items()}
                if not self.layout.paddable or self._wastes(part, rows, sizes):
                    return False
            if rows > self.cap.rows_at(sizes):
                return False
        self.parts.append(part)
        self.rows, self.sizes = rows, sizes
        self.cells += part.cells
        return True

    def _wastes(self, part: Part, rows: int, sizes: Sizes) -> bool:
        """Return whether there is much padding in the batch with this part, of so many rows, padded to these sizes."""
        rounded = self.layout.round_sizes(sizes)
        if rounded == self.layout.round_sizes(part.sizes) == self.layout.round_sizes(self.sizes):
            return False  # of the size that the batch has
        return self.cells + part.cells < (1 - PADDING) * rows * math.prod(rounded.values())


def round_up(size: int) -> int:
    """Round up to the next size of FINENESS between a power of two and the next, in steps of 2 at least."""
    step = max(2, (1 << (size - 1).bit_length()) // (2 * FINENESS))
    return -(-size // step) * step


class Layout:
    """Joins the inputs of several requests into one batch, and splits the outputs again.

    Requests of different sizes share a batch only where the task pads free axes (`padding`: the value by input name).
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        padding: Mapping[str, int] | None = None,
        *,
        rounded: bool = False,
        derive: Callable[[Sizes], Sizes] = lambda sizes: {},
    ) -> None:
        """rounded: whether free axes that the task pads are rounded up to one of few sizes. derive: the sizes of
        further axes of the outputs, from those of the inputs; see `Task.derive_sizes`."""
        self.inputs = tuple(inputs)
        self.outputs = {spec.name: spec for spec in outputs}
        self.padding = dict(padding or {})
        self._derive = derive
        self.batched = all(spec.batched for spec in (*inputs, *outputs))
        self._free = [
            (spec.name, index, axis)
            for spec in inputs
            for index, axis in enumerate(spec.shape)
            if isinstance(axis, str) and not (self.batched and axis == BATCH)
        ]
        self.rounded = rounded
        self.largest = {axis: high for spec in inputs for axis, (_, high) in spec.bounds.items()}
        self.paddable = self.batched and all(
            spec.name in self.padding for spec in inputs if any(isinstance(axis, str) for axis in spec.shape[1:])
        )

    def make_part(self, inputs: Arrays) -> Part:
        """Make a part of one request. inputs: checked against the signature."""
        sizes = {axis: inputs[name].shape[index] for name, index, axis in self._free}
        rows = len(inputs[self.inputs[0].name]) if self.batched else 1
        return Part(inputs, rows, sizes)

    def split_request(self, inputs: Arrays, cap: Cap) -> list[Part]:
        """Split a request that is larger than one batch into parts of a quarter of a batch each.

        Of parts as large as a batch, each would keep an executor from small requests for as long as it can be.
        """
        whole = self.make_part(inputs)
        most = cap.rows_at(whole.sizes)
        if whole.rows <= most:
            return [whole]
        most = max(1, most // 4)
        return [
            Part({name: array[start : start + most] for name, array in inputs.items()}, rows, whole.sizes)
            for start in range(0, whole.rows, most)
            for rows in [min(most, whole.rows - start)]
        ]

    def halve(self, part: Part) -> list[Part]:
        """Halve a part of several rows."""
        half = part.rows // 2
        return [
            Part({name: array[rows] for name, array in part.inputs.items()}, count, part.sizes)
            for rows, count in ((slice(half), half), (slice(half, None), part.rows - half))
        ]

    def join_outputs(self, parts: Sequence[Arrays]) -> Arrays:
        """Join the outputs of a request's parts."""
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def sizes(self, parts: Sequence[Part]) -> Sizes:
        """Return the size of each free axis in a batch of these parts."""
        return self.round_sizes({axis: max(part.sizes[axis] for part in parts) for axis in parts[0].sizes})

    def round_sizes(self, sizes: Sizes) -> Sizes:
        """Return the sizes that free axes of these sizes are padded to."""
        if not sizes or not self.rounded or not self.paddable:
            return sizes
        rounded = {axis: round_up(size) for axis, size in sizes.items()}
        return {axis: max(sizes[axis], min(size, self.largest.get(axis, size))) for axis, size in rounded.items()}

    def join_inputs(self, parts: Sequence[Part]) -> Arrays:
        """Join parts to one batch, in new arrays: a request's tensors are unaligned, read-only views of its body."""
        if not self.batched:
            return {name: array.copy() for name, array in parts[0].inputs.items()}
        sizes = self.sizes(parts)
        return {spec.name: self._join_input(spec, parts, sizes) for spec in self.inputs}

    def _join_input(self, spec: TensorSpec, parts: Sequence[Part], sizes: Sizes) -> Array:
        arrays = [part.inputs[spec.name] for part in parts]
        if not sizes:
            return np.concatenate(arrays)
        shape = (
            sum(part.rows for part in parts),
            *(axis if isinstance(axis, int) else sizes[axis] for axis in spec.shape[1:]),
        )
        if all(array.shape[1:] == shape[1:] for array in arrays):
            return np.concatenate(arrays)
        batch = np.full(shape, self.padding[spec.name], spec.dtype)
        start = 0
        for array in arrays:
            batch[(slice(start, start + len(array)), *map(slice, array.shape[1:]))] = array
            start += len(array)
        return batch

    def split_outputs(self, outputs: Arrays, parts: Sequence[Part]) -> list[Arrays]:
        """Split a batch's outputs into those of each part: its rows, without the padding.

        Raises ValueError where the model returns another number of rows than it was given.
        """
        if not self.batched:
            return [outputs]
        rows = sum([part.rows for part in parts])
        for name, array in outputs.items():
            if len(array) != rows:
                raise ValueError(f"output {name!r} has {len(array)} rows for a batch of {rows}")
        sizes = self.sizes(parts)
        if len(parts) == 1 and sizes == parts[0].sizes:
            return [outputs]
        answers, start = [], 0
        for part in parts:
            stop = start + part.rows
            answers.append(
                {name: self._split_output(name, array[start:stop], part, sizes) for name, array in outputs.items()}
            )
            start = stop
        return answers

    def _split_output(self, name: str, array: Array, part: Part, sizes: Sizes) -> Array:
        if part.sizes == sizes:
            return array
        axes = self.outputs[name].shape[1:]
        part_sizes = {**part.sizes, **self._derive(part.sizes)}
        return array[(slice(None), *(slice(part_sizes.get(axis) if isinstance(axis, str) else None) for axis in axes))]
