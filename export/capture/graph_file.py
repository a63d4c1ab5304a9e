"""Writing a normalized graph to disk."""

import shutil
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import GraphProto

from export.capture.model_file import LARGEST
from export.passes.normalize import normalize
from export.passes.stored_weights import RECURRENT
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
MULTIPLIERS = RECURRENT | {"MatMul", "Gemm", "Conv", "ConvTranspose"}
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
    """Yield a sentence for each kind of weights that quantization does not reach, or only to store them."""
    proto = onnx.load(graph.path, load_external_data=False).graph
    reached = {layer.weight for layer in graph.layers} | {each.name for layer in graph.layers for each in layer.stored}
    for (operator, stored), count in sorted(count_inner_layers(proto, reached).items()):
        why = "their weights are stored in fewer bits, and multiplied in float" if stored else "they stay as they are"
        yield f"{count} layers are inside {operator}, whose bodies are not quantized: {why}"
    if not graph.layers:
        yield "no layer of this model can be quantized: it does not become smaller"


def count_inner_layers(
    graph: GraphProto, reached: Container[str], outside: frozenset[str] = frozenset()
) -> Counter[tuple[str, bool]]:
    """Count the nodes that multiply by weights in the bodies of If, Loop and Scan, by the operator around them, and by
    whether their weights are among those that are reached. outside: the weights of the graphs around this one."""
    weights = outside | {tensor.name for tensor in graph.initializer}
    counts: Counter[tuple[str, bool]] = Counter()
    for node in graph.node:
        for inner in (body for attribute in node.attribute for body in (attribute.g, *attribute.graphs)):
            known = weights | {tensor.name for tensor in inner.initializer}
            for each in inner.node:
                names = known & set(each.input) if each.op_type in MULTIPLIERS else ()
                if names:
                    counts[node.op_type, any(name in reached for name in names)] += 1
            for (_, stored), count in count_inner_layers(inner, reached, weights).items():
                counts[node.op_type, stored] += count
    return counts
