"""A layer as products of matrices: what it multiplies its weight with, row by row."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from onnx import NodeProto, helper

from laconic.quantization.graph import Layer
from laconic.tensor import Array

PLACES = 4096
"""Places of one input that a convolution is looked at; of more, as many are drawn."""


@dataclass(frozen=True)
class Product:
    """Rows [groups, count, in] times a weight [groups, in, out]. A linear layer is one group.

    strides, dilations, pads: of a convolution, empty for a linear layer; pads: None where they follow from the size.
    """

    groups: int = 1
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] | None = ()
    upper: bool = True

    @classmethod
    def of(cls, node: NodeProto, layer: Layer) -> Self:
        """Of a MatMul or a Conv."""
        if layer.kind == "MatMul":
            return cls()
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        axes = len(layer.shape) - 2
        auto = bytes(given.get("auto_pad", b"NOTSET")).decode()
        return cls(
            given.get("group", 1),
            tuple(given.get("strides", [1] * axes)),
            tuple(given.get("dilations", [1] * axes)),
            None if auto.startswith("SAME") else tuple(given.get("pads", [0] * (2 * axes))),
            auto == "SAME_UPPER",
        )

    def matrix(self, weight: Array) -> Array:
        """The layer's weight as [groups, in, out]."""
        if not self.strides:
            return weight[None]
        return np.asarray(weight.reshape(self.groups, len(weight) // self.groups, -1).transpose(0, 2, 1))

    def weight(self, matrix: Array, shape: Iterable[int]) -> Array:
        """The layer's weight, from what `matrix` gives."""
        if not self.strides:
            return np.asarray(matrix[0])
        return np.ascontiguousarray(matrix.transpose(0, 2, 1).reshape(tuple(shape)))

    def rows(self, values: Array, kernel: tuple[int, ...], rng: np.random.Generator) -> Array:
        """What the weight is multiplied with, [groups, count, in]; of a convolution with many places, some of them.

        values: the layer's input. kernel: the convolution's, empty for a linear layer.
        """
        if not self.strides:
            return np.asarray(values.reshape(1, -1, values.shape[-1]))
        reach = tuple(dilation * (size - 1) + 1 for dilation, size in zip(self.dilations, kernel, strict=True))
        axes = len(kernel)
        padded = np.pad(values, self.padding(values.shape[2:], reach))
        views = sliding_window_view(padded, reach, axis=tuple(range(2, 2 + axes)))
        hops = [slice(None, None, size) for size in (1, 1, *self.strides, *self.dilations)]
        views = np.moveaxis(views[tuple(hops)], 1, 1 + axes)  # [batch, *places, channels, *kernel]
        sizes = views.shape[: 1 + axes]
        places = np.arange(np.prod(sizes))
        if len(places) > PLACES:
            places = np.sort(rng.choice(places, PLACES, replace=False))
        patches = views[np.unravel_index(places, sizes)].reshape(len(places), self.groups, -1)
        return np.ascontiguousarray(patches.transpose(1, 0, 2))

    def padding(self, sizes: Iterable[int], reach: Iterable[int]) -> list[tuple[int, int]]:
        """How far each axis of the input is padded, before and behind."""
        if self.pads is not None:
            half = len(self.pads) // 2
            return [(0, 0), (0, 0), *zip(self.pads[:half], self.pads[half:], strict=True)]
        missing = [
            max((-(-size // stride) - 1) * stride + wide - size, 0)
            for size, stride, wide in zip(sizes, self.strides, reach, strict=True)
        ]
        lower = [total // 2 if self.upper else -(-total // 2) for total in missing]
        return [(0, 0), (0, 0), *((low, total - low) for low, total in zip(lower, missing, strict=True))]
