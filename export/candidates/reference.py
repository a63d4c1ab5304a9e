"""Reference execution: a graph for an engine that is not on this machine, run node by node on the CPU.

INT8, INT4 and FP8 with Q/DQ are run as they stand. Arithmetic in FP16 and BF16 is run in FP32, with each result rounded
to its type: the CPU provider has no kernels of BF16, and leaves out the rounding between most of those of FP16.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import Session

REFERENCE = OnnxRuntime()
"""The engine of reference execution; without its optimizations."""

HALF_ELEMENTS = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})


def open_reference(model: Path, threads: int = 1) -> Session:
    """Load a graph to be run node by node on the CPU. Raises RuntimeFailure for an operator that is missing there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reference.onnx"
        onnx.save(round_in_float32(onnx.load(model)), path, save_as_external_data=True, location="reference.data")
        return REFERENCE.open(path, threads=threads, optimize=False)


def round_in_float32(model: ModelProto) -> ModelProto:
    """Return the graph in FP32, with each result that was FP16 or BF16 rounded to it."""
    inferred = shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.value_info}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        halves = [name for name in node.output if types.get(name) in HALF_ELEMENTS]
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in HALF_ELEMENTS:
                attribute.i = TensorProto.FLOAT
        for slot, name in enumerate(node.output):
            if name in halves:
                node.output[slot] = f"{name}/exact"
        nodes.append(node)
        for name in halves:
            nodes += [
                helper.make_node("Cast", [f"{name}/exact"], [f"{name}/rounded"], to=types[name]),
                helper.make_node("Cast", [f"{name}/rounded"], [name], to=TensorProto.FLOAT),
            ]
    for tensor in model.graph.initializer:
        if tensor.data_type in HALF_ELEMENTS:
            array = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    return model
