"""im2col: a linear layer or a convolution as a product of matrices."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from onnx import NodeProto, helper

from laconic.arrays import Array
from laconic.quantization.graph import Layer

MAX_PATCHES = 4096
"""Patches of one input that a convolution is unfolded to; of more, a random sample of as many is taken."""


@dataclass(frozen=True)
class Im2Col:
    """A layer as a product of its unfolded input [groups, count, in] and a weight [groups, in, out].

    groups: of a convolution; 1 for a linear layer. strides, dilations, pads: of a convolution, empty for a linear
    layer; pads: None for ONNX's auto_pad SAME. upper: whether that pads more at the end (SAME_UPPER).
    """

    groups: int = 1
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] | None = ()
    upper: bool = True

    @classmethod
    def of(cls, node: NodeProto, layer: Layer) -> Self:
        """Return the unfolding of a MatMul or a Conv."""
        if layer.kind == "MatMul":
            return cls()
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        axes = len(layer.shape) - 2
        auto = bytes(attributes.get("auto_pad", b"NOTSET")).decode()
        return cls(
            attributes.get("group", 1),
            tuple(attributes.get("strides", [1] * axes)),
            tuple(attributes.get("dilations", [1] * axes)),
            None if auto.startswith("SAME") else tuple(attributes.get("pads", [0] * (2 * axes))),
            auto == "SAME_UPPER",
        )

    def unfold_weight(self, weight: Array) -> Array:
        """Reshape the layer's weight to [groups, in, out]."""
        if not self.strides:
            return weight[None]
        return np.asarray(weight.reshape(self.groups, len(weight) // self.groups, -1).transpose(0, 2, 1))

    def fold_weight(self, matrix: Array, shape: Iterable[int]) -> Array:
        """Undo `unfold_weight`: reshape a matrix [groups, in, out] to the layer's weight of this shape."""
        if not self.strides:
            return np.asarray(matrix[0])
        return np.ascontiguousarray(matrix.transpose(0, 2, 1).reshape(tuple(shape)))

    def unfold_input(self, values: Array, kernel: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Return the rows that the weight is multiplied with, [groups, count, in]; at most MAX_PATCHES for a
        convolution.

        values: the layer's input. kernel: sizes of the convolution's kernel, empty for a linear layer. rng: for the
        sample of patches.
        """
        if not self.strides:
            return np.asarray(values.reshape(1, -1, values.shape[-1]))
        reach = tuple(dilation * (size - 1) + 1 for dilation, size in zip(self.dilations, kernel, strict=True))
        axes = len(kernel)
        padded = np.pad(values, self.padding(values.shape[2:], reach))
        views = sliding_window_view(padded, reach, axis=tuple(range(2, 2 + axes)))
        hops = [slice(None, None, size) for size in (1, 1, *self.strides, *self.dilations)]
        views = np.moveaxis(views[tuple(hops)], 1, 1 + axes)  # [batch, *positions, channels, *kernel]
        sizes = views.shape[: 1 + axes]
        positions = np.arange(np.prod(sizes))
        if len(positions) > MAX_PATCHES:
            positions = np.sort(rng.choice(positions, MAX_PATCHES, replace=False))
        patches = views[np.unravel_index(positions, sizes)].reshape(len(positions), self.groups, -1)
        return np.ascontiguousarray(patches.transpose(1, 0, 2))

    def sum_input(self, values: Array, kernel: tuple[int, ...]) -> tuple[Array, int]:
        """Return the sum of all rows that the weight is multiplied with, [groups, in] float64, and their number. They
        are summed axis by axis without being unfolded, which took three quarters of the rounding of an OCR network; of
        many places of a convolution, those of every second or further row.

        Arguments as of `unfold_input`.
        """
        if not self.strides:
            rows = values.reshape(1, -1, values.shape[-1])
            return rows.sum(axis=1, dtype=np.float64), rows.shape[1]
        reach = tuple(dilation * (size - 1) + 1 for dilation, size in zip(self.dilations, kernel, strict=True))
        padded = np.pad(values, self.padding(values.shape[2:], reach))
        sizes = zip(padded.shape[2:], reach, self.strides, strict=True)
        stops = [(size - wide) // stride + 1 for size, wide, stride in sizes]
        hop = min(max(math.prod(stops) // MAX_PATCHES, 1), stops[0])
        sums: Array = np.moveaxis(padded, 0, -1)  # [channels, *sizes, batch]
        count = len(values)
        for axis, taps in enumerate(kernel):
            stride, dilation = self.strides[axis], self.dilations[axis]
            end, step = (stops[axis] - 1) * stride + 1, stride * (1 if axis else hop)
            places = [slice(tap, tap + end, step) for tap in range(0, taps * dilation, dilation)]
            sums = np.stack([sums[:, place].sum(axis=1, dtype=np.float64) for place in places], axis=-1)
            count *= len(range(0, end, step))
        sums = sums.sum(axis=1)
        return np.asarray(sums.reshape(self.groups, -1)), count

    def padding(self, sizes: Iterable[int], reach: Iterable[int]) -> list[tuple[int, int]]:
        """Return the padding of each axis, before and after. reach: extent of the dilated kernel along each axis."""
        if self.pads is not None:
            half = len(self.pads) // 2
            return [(0, 0), (0, 0), *zip(self.pads[:half], self.pads[half:], strict=True)]
        missing = [
            max((-(-size // stride) - 1) * stride + wide - size, 0)
            for size, stride, wide in zip(sizes, self.strides, reach, strict=True)
        ]
        lower = [total // 2 if self.upper else -(-total // 2) for total in missing]
        return [(0, 0), (0, 0), *((low, total - low) for low, total in zip(lower, missing, strict=True))]
