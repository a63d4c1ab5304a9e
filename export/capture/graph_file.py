"""Writing a normalized graph to disk."""

import shutil
from pathlib import Path

import onnx_ir as ir

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
