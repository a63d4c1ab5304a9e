"""Calibration: run samples through the float graph and find the range of every tensor that an engine may quantize.

The samples stream through: memory is one histogram a tensor plus one sample, whatever their number and lengths.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper, shape_inference

from compress.quantize.channel_statistics import Channels
from compress.quantize.histogram import Histogram
from laconic.data.dataset import Dataset, batches
from laconic.errors import DataError
from laconic.quantization.graph import Graph
from laconic.recipes.stage import Context
from laconic.runtimes.runtime import Runtime
from laconic.tasks.task import Task
from laconic.tensor import Arrays

QUANTIZABLE = frozenset(
    {
        "Add",
        "AveragePool",
        "Clip",
        "Concat",
        "Conv",
        "Gemm",
        "GlobalAveragePool",
        "HardSwish",
        "LayerNormalization",
        "MatMul",
        "MaxPool",
        "Mul",
        "ReduceMean",
        "Relu",
        "Softmax",
    }
)
"""The operators that some engine runs in INT8, or whose result such an operator takes."""


FRAGMENTS = 0.5
"""Fragments of the samples that are calibrated with as well, for each sample. 60 texts of a word or two, to MiniLM that
was calibrated on docstrings: worst cosine 0.826, mean 0.977; with fragments 0.946 and 0.993, with twice as many no
better; and the docstrings' own mean went from 0.9975 to 0.9976."""


@dataclass(frozen=True)
class Observation:
    """histograms: of every quantizable tensor. channels: of what goes into the linear layers."""

    histograms: dict[str, Histogram]
    channels: dict[str, Channels]


def drawn(context: Context, count: int) -> list[Dataset]:
    """So many of the samples to calibrate with, and fragments of them."""
    whole = context.calibrate.take(count, context.seed)
    pieces = context.task.fragments(whole.samples, int(len(whole) * FRAGMENTS), context.seed)
    return [whole, *([Dataset.of(pieces, context.task, name="fragments")] if pieces else [])]


def singles(datasets: Sequence[Dataset], task: Task) -> Iterator[Arrays]:
    """One sample a batch: no padding is counted, and lengths may vary."""
    for dataset in datasets:
        for _, batch in batches(dataset, task, 1):
            yield batch


def observe(graph: Graph, batches: Iterable[Arrays], runtime: Runtime, folder: Path, seed: int = 0) -> Observation:
    """Run the batches and look at what flows through each quantizable tensor.

    batches: inputs by name; best one sample each, so that no padding is counted. runtime: opens the graph with more
    outputs. folder: where that graph is written. Raises DataError where no batch comes.
    """
    names, model = expose(graph)
    histograms = {name: Histogram() for name in names}
    channels = {layer.input: Channels(seed) for layer in graph.layers if layer.kind == "MatMul"}
    ran = False
    with runtime.open(model_file(model, folder)) as session:
        for batch in batches:
            outputs = session.run(batch)
            for name, histogram in histograms.items():
                histogram.add(outputs[name])
            for name, each in channels.items():
                each.add(outputs[name])
            ran = True
    if not ran:
        raise DataError("there is no sample to calibrate with. Give --data a file with at least one")
    return Observation(histograms, channels)


def expose(graph: Graph) -> tuple[list[str], onnx.ModelProto]:
    """The quantizable tensors, and the graph with each of them as an output."""
    model = onnx.load(graph.path)
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    floats = {
        value.name
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    names = []
    for node in model.graph.node:
        if node.op_type in QUANTIZABLE:
            names += [name for name in (*node.input, *node.output) if name in floats]
    names = list(dict.fromkeys(names))
    outputs = {value.name for value in model.graph.output}
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in outputs
    )
    return names, model


def model_file(model: onnx.ModelProto, folder: Path) -> Path:
    """Write the graph that shows its tensors."""
    path = folder / "calibrate.onnx"
    onnx.save(model, path)
    return path
