"""Writing a normalized graph to disk."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import GraphProto

from export.capture.model_file import LARGEST
from export.passes.normalize import normalize
from laconic import __version__
from laconic.artifacts.manifest import MODEL
from laconic.hashing import digest_file, hash_of
from laconic.quantization.graph import Graph
from laconic.tensor import TensorSpec

OPSET = 20
"""The exported opset. Up to 22 attention is MatMul and Softmax, which every engine has kernels for; from 23 it is one
operator. Per-channel Q/DQ needs 13, Gelu as one operator 20."""
IR_VERSION = 10
"""The version of the file format, for opsets up to 22. A source with a newer opset keeps its own."""
DATA = "model.data"
NOTED_SHARE = 0.1
"""The share of weights that are not quantized from which on it is said."""
RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
MULTIPLIERS = frozenset({"MatMul", "Gemm", "Conv"}) | RECURRENT
"""Operators that multiply by weights."""


def write_graph(
    model: ir.Model, folder: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> Graph:
    """Normalize the model and write it as `model.onnx`, with external data in `model.data` if it is large. Both files
    are complete when they appear.

    The same model gives the same bytes.
    """
    layers = normalize(model, inputs, outputs)
    if model.opset_imports.get("", OPSET) <= 22:
        model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "laconic", __version__
    model.graph.name = "main"
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    made = folder / ".graph.new"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    if size > LARGEST:
        ir.save(model, made / MODEL, external_data=DATA)
    else:
        (made / MODEL).write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
    files = sorted(made.iterdir())
    key = hash_of([digest_file(file).sha256 for file in files])
    for file in files:
        file.replace(folder / file.name)
    made.rmdir()
    return Graph(path=folder / MODEL, inputs=inputs, outputs=outputs, layers=layers, key=key)


def list_unquantized(graph: Graph) -> Iterator[str]:
    """Yield a sentence for each kind of weights that no quantization reaches."""
    proto = onnx.load(graph.path, load_external_data=False).graph
    for operator, count in count_inner_layers(proto).items():
        yield f"{count} layers are inside {operator}, whose bodies are not quantized"
    if (share := count_recurrent_share(proto)) >= NOTED_SHARE:
        yield f"{100 * share:.0f} % of the weights are in LSTM, GRU or RNN, which are not quantized"
    if not graph.layers:
        yield "no layer of this model can be quantized: it does not become smaller"


def count_inner_layers(graph: GraphProto) -> dict[str, int]:
    """Count the nodes that multiply by weights in the bodies of If, Loop and Scan, by the operator around them."""
    weights = {tensor.name for tensor in graph.initializer}
    counts: dict[str, int] = {}
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                known = weights | {tensor.name for tensor in inner.initializer}
                own = sum(each.op_type in MULTIPLIERS and not known.isdisjoint(each.input) for each in inner.node)
                nested = sum(count_inner_layers(inner).values())
                if own + nested:
                    counts[node.op_type] = counts.get(node.op_type, 0) + own + nested
    return counts


def count_recurrent_share(graph: GraphProto) -> float:
    """Return the share of all weights that recurrent layers hold, which are not quantized."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    recurrent = {name for node in graph.node if node.op_type in RECURRENT for name in node.input}
    total = sum(sizes.values())
    return sum(size for name, size in sizes.items() if name in recurrent) / total if total else 0.0
