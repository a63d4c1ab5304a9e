"""First and second moments of the inputs of a graph's layers, for GPTQ, AdaRound and bias correction."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from compress.quantize.calibration import write_with_outputs
from compress.quantize.im2col import Im2Col
from laconic.arrays import Array, Arrays
from laconic.hardware import cores
from laconic.quantization.graph import Graph, Layer
from laconic.runtimes.runtime import Runtime

MEMORY_LIMIT = 1 << 30
"""Bytes of second moments that are held at once; for more, the samples run several times."""
ROWS = 512
"""Input rows whose products are added at once: 90 rows of 1,536 inputs take 3 times as long by themselves."""

ActivationQuantizer = Callable[[Array], Array]
"""Fake quantization of a tensor."""


@dataclass
class GraphMoments:
    """Sums over the input rows x of a layer.

    total: of x, [groups, in]. quantized: of x fake-quantized, [groups, in]. gram: of x xT, [groups, in, in]. All
    float64. count: number of rows. sampled: number of rows in `gram`, fewer where a convolution has many. waiting: rows
    that are not in `gram` yet, [groups, rows, in] each.
    """

    total: Array
    quantized: Array
    gram: Array
    count: int = 0
    sampled: int = 0
    waiting: list[Array] = field(default_factory=list)

    @classmethod
    def zeros(cls, groups: int, width: int) -> "GraphMoments":
        """Return the moments of no rows."""
        return cls(np.zeros((groups, width)), np.zeros((groups, width)), np.zeros((groups, width, width)))

    def add_rows(self, rows: Array) -> None:
        """Add rows to `gram`, [groups, rows, in], now or with those that follow."""
        self.waiting.append(rows)
        if sum(each.shape[1] for each in self.waiting) >= ROWS:
            self.add_waiting()

    def add_waiting(self) -> None:
        """Add the rows that wait to `gram`."""
        if self.waiting:
            rows = np.concatenate(self.waiting, axis=1)
            self.gram += rows.transpose(0, 2, 1) @ rows
            self.sampled += rows.shape[1]
            self.waiting.clear()

    @property
    def second(self) -> Array:
        """The mean of x xT, [groups, in, in]."""
        return self.gram / max(self.sampled, 1)


@dataclass(frozen=True)
class LayerInput:
    """How a layer reads a tensor; layers that read it in the same way share its moments.

    kernel: sizes of a convolution's kernel. quantized: whether it is read in INT8.
    """

    tensor: str
    im2col: Im2Col
    kernel: tuple[int, ...]
    quantized: bool

    def add_first(self, values: Array, quantizer: ActivationQuantizer, sums: GraphMoments) -> None:
        """Add the first moments of a tensor."""
        total, count = self.im2col.sum_input(values, self.kernel)
        sums.total += total
        sums.quantized += self.im2col.sum_input(quantizer(values), self.kernel)[0] if self.quantized else total
        sums.count += count

    def add_second(self, values: Array, rng: np.random.Generator, sums: GraphMoments) -> None:
        """Add the second moments of a tensor. rng: for the sample of patches."""
        sums.add_rows(self.im2col.unfold_input(values, self.kernel, rng))


def collect_moments(
    graph: Graph,
    layers: Sequence[Layer],
    quantize: Mapping[str, ActivationQuantizer],
    samples: Callable[[], Iterable[Arrays]],
    runtime: Runtime,
    folder: Path,
    *,
    second: bool,
    seed: int = 0,
) -> Iterator[tuple[Layer, Im2Col, GraphMoments]]:
    """Collect the moments of the layers' inputs; yields each layer with its unfolding and moments.

    quantize: fake quantization of a layer's input, by node; without it, the input stays as it is. samples: returns the
    batches to run, again at each call, of one sample each, so that no padding is counted. runtime: runs the graph with
    additional outputs, which is written to `folder`. second: whether to collect second moments, or means alone. seed:
    of the sample of patches.
    """
    model = onnx.load(graph.path)
    nodes = {node.name: node for node in model.graph.node}
    seen = {
        layer: LayerInput(layer.input, Im2Col.of(nodes[layer.node], layer), layer.shape[2:], layer.node in quantize)
        for layer in layers
    }
    for part in split_by_memory(seen, MEMORY_LIMIT if second else None):
        moments = {seen[layer]: GraphMoments.zeros(seen[layer].im2col.groups, input_width(layer)) for layer in part}
        quantizers = {seen[layer]: quantize.get(layer.node, identity) for layer in part}
        path = write_with_outputs(model, sorted({source.tensor for source in moments}), folder / "moments.onnx")
        rng = np.random.default_rng(seed)
        with runtime.open(path, threads=cores()) as session:
            for batch in samples():
                outputs = session.run(batch)
                for source, sums in moments.items():
                    source.add_first(outputs[source.tensor], quantizers[source], sums)
                    if second:
                        source.add_second(outputs[source.tensor], rng, sums)
        for sums in moments.values():
            sums.add_waiting()
        yield from ((layer, seen[layer].im2col, moments[seen[layer]]) for layer in part)


def identity(values: Array) -> Array:
    """Return the quantizer of a tensor that stays in float."""
    return values


def input_width(layer: Layer) -> int:
    """Return the number of inputs of each output of a layer."""
    return layer.shape[0] if layer.kind == "MatMul" else layer.parameters // layer.shape[0]


def split_by_memory(seen: Mapping[Layer, LayerInput], budget: int | None) -> Iterator[list[Layer]]:
    """Split the layers into parts whose second moments take at most `budget` bytes, or are those of one input."""
    part: list[Layer] = []
    inputs: dict[LayerInput, int] = {}
    for layer, source in sorted(seen.items(), key=lambda item: item[1].tensor):
        width = input_width(layer)
        size = source.im2col.groups * width * (8 * width + 4 * ROWS)
        if part and source not in inputs and budget is not None and sum(inputs.values()) + size > budget:
            yield part
            part, inputs = [], {}
        inputs[source] = size
        part.append(layer)
    if part:
        yield part
