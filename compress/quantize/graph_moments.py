"""What flows into the layers of a graph: its means and second moments, which rounding is decided by."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from compress.quantize.product import Product
from laconic.quantization.graph import Graph, Layer
from laconic.runtimes.runtime import Runtime
from laconic.tensor import Array, Arrays

BUDGET = 1 << 30
"""Bytes of second moments that are held at once; for more of them the samples run again."""

Quantize = Callable[[Array], Array]
"""What a tensor becomes by quantization."""


@dataclass
class Moments:
    """Sums over the rows x [in] of each group: total: of x; quantized: of x on its grid; gram: of x xT. count: of rows.

    [groups, in] and [groups, in, in], float64.
    """

    total: Array
    quantized: Array
    gram: Array
    count: int = 0

    @classmethod
    def nothing(cls, groups: int, width: int) -> "Moments":
        """Of no rows."""
        return cls(np.zeros((groups, width)), np.zeros((groups, width)), np.zeros((groups, width, width)))

    def add(self, rows: Array, quantized: Array, *, second: bool) -> None:
        """Count rows [groups, count, in]. second: their products, too."""
        self.total += rows.sum(axis=1, dtype=np.float64)
        self.quantized += quantized.sum(axis=1, dtype=np.float64)
        if second:
            self.gram += rows.transpose(0, 2, 1) @ rows
        self.count += rows.shape[1]


@dataclass(frozen=True)
class View:
    """How layers see a tensor: those that see it alike share its moments. kernel: of a convolution."""

    tensor: str
    product: Product
    kernel: tuple[int, ...]
    quantized: bool


def moments(
    graph: Graph,
    layers: Sequence[Layer],
    quantize: Mapping[str, Quantize],
    samples: Callable[[], Iterable[Arrays]],
    runtime: Runtime,
    folder: Path,
    *,
    second: bool,
    seed: int = 0,
) -> Iterator[tuple[Layer, Product, Moments]]:
    """Each layer, how it multiplies, and the moments of what it reads. In memory are those of some layers at a time.

    quantize: by layer, what its input becomes; a layer that is not there reads it as it is. samples: gives the batches
    to run, anew at each call; best one sample each, so that no padding is counted. second: whether second moments are
    wanted, or means alone. folder: where a graph that shows its tensors is written.
    """
    model = onnx.load(graph.path)
    nodes = {node.name: node for node in model.graph.node}
    seen = {
        layer: View(layer.input, Product.of(nodes[layer.node], layer), layer.shape[2:], layer.node in quantize)
        for layer in layers
    }
    for part in parted(seen, BUDGET if second else None):
        found = {seen[layer]: Moments.nothing(seen[layer].product.groups, width(layer)) for layer in part}
        grids = {seen[layer]: quantize.get(layer.node, unchanged) for layer in part}
        path = shown(model, {view.tensor for view in found}, folder)
        rng = np.random.default_rng(seed)
        with runtime.open(path) as session:
            for batch in samples():
                outputs = session.run(batch)
                for view, each in found.items():
                    rows = view.product.rows(outputs[view.tensor], view.kernel, rng)
                    each.add(rows, grids[view](rows), second=second)
        yield from ((layer, seen[layer].product, found[seen[layer]]) for layer in part)


def unchanged(values: Array) -> Array:
    """What becomes of a tensor that is not quantized."""
    return values


def width(layer: Layer) -> int:
    """Inputs of each output of a layer."""
    return layer.shape[0] if layer.kind == "MatMul" else layer.parameters // layer.shape[0]


def parted(seen: Mapping[Layer, View], budget: int | None) -> Iterator[list[Layer]]:
    """The layers in parts, the second moments of each at most so many bytes, or those of one view."""
    part: list[Layer] = []
    views: dict[View, int] = {}
    for layer, view in sorted(seen.items(), key=lambda item: item[1].tensor):
        size = view.product.groups * width(layer) ** 2 * 8
        if part and view not in views and budget is not None and sum(views.values()) + size > budget:
            yield part
            part, views = [], {}
        views[view] = size
        part.append(layer)
    if part:
        yield part


def shown(model: onnx.ModelProto, tensors: set[str], folder: Path) -> Path:
    """Write the graph with these tensors as outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    outputs = {value.name for value in model.graph.output}
    copy.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in sorted(tensors - outputs)
    )
    path = folder / "moments.onnx"
    onnx.save(copy, path)
    return path
