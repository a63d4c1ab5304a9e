"""Reading ONNX files of any exporter: what is damaged is refused, and old or narrow forms are widened."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import ModelProto, version_converter

from laconic.errors import SourceError

LEAST_OPSET = 13
"""The first opset with per-channel scales in QuantizeLinear. A newer file keeps its own."""
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
STANDARD = ("", "ai.onnx")


def read_onnx(path: Path) -> ModelProto:
    """Read and check a model. Raises SourceError for one that is damaged or lacks its external data."""
    try:
        proto = onnx.load(path)
        onnx.checker.check_model(proto if proto.ByteSize() < 2**31 - 1 else path)
    except FileNotFoundError as error:
        raise SourceError(
            f"{error.filename or path} is missing. Copy the model again, with its external data"
        ) from error
    except Exception as error:
        raise SourceError(
            f"{path} is not a valid ONNX file ({' '.join(str(error).split())[:200]}): it is truncated, or has another "
            f"format. Export it again"
        ) from error
    return proto


def raise_opset(proto: ModelProto, path: Path) -> ModelProto:
    """Return the model in an opset that can be quantized. Raises SourceError where it cannot be converted."""
    version = next((entry.version for entry in proto.opset_import if entry.domain in STANDARD), LEAST_OPSET)
    if version >= LEAST_OPSET:
        return proto
    try:
        return version_converter.convert_version(proto, LEAST_OPSET)
    except RuntimeError as error:
        raise SourceError(
            f"{path} has opset {version}, which cannot be converted to {LEAST_OPSET} ({error}). Export it again with "
            f"opset {LEAST_OPSET} or later"
        ) from error


def find_quantized_operators(proto: ModelProto) -> list[str]:
    """Find the operators by which a model is quantized already, sorted; none for a float model."""
    return sorted(
        {node.op_type for node in proto.graph.node if "Quantize" in node.op_type or "Integer" in node.op_type}
    )


def has_half_precision(model: ir.Model) -> bool:
    """Return whether any weight of a model is in FP16 or BF16."""
    return any(
        value.const_value is not None and value.const_value.dtype in HALVES
        for graph in (model.graph, *model.graph.subgraphs())
        for value in graph.initializers.values()
    )


def widen_half(model: ir.Model) -> None:
    """Make a model in FP16 or BF16 compute in FP32, in place; its inputs and outputs become FP32 too."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in list_values(graph):
            if value.const_value is not None and value.const_value.dtype in HALVES:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
            if value.dtype in HALVES:
                value.dtype = ir.DataType.FLOAT
    for node in model.graph.all_nodes():
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in HALVES:
                wide = ir.tensor(attribute.value.numpy().astype(np.float32), name=attribute.value.name)
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, wide)
            elif (node.op_type, attribute.name) == ("Cast", "to") and attribute.value in HALVES:
                node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(ir.DataType.FLOAT))


def list_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the inputs, the initializers and the outputs of all nodes of a graph, without its subgraphs."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs
