"""An ONNX file, indexed for the linters: producers, readers, constants and element types by tensor name."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from laconic.arrays import Array
from laconic.errors import SourceError

Severity = Literal["error", "warning"]
"""error: the graph is refused, or a layer leaves its 8-bit arithmetic. warning: speed, or not certain."""
Problem = tuple[Severity, str, str]
"""What a rule yields: severity, the name of a node, tensor or file, and a message."""

DEFAULT_DOMAINS = ("", "ai.onnx")
MAX_INFERRED_BYTES = 2**31 - 1
"""Shape inference serializes the model, and protobuf is limited to 2 GiB."""
COMMUTING = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})
"""Operators that an engine moves across Q/DQ nodes, since they only move numbers."""
LEAST_INPUTS = {
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "MatMul", "Gemm", "Conv", "ConvTranspose", "Add"), 2),
    **dict.fromkeys(("BatchNormalization", "Cast", "Clip", "Relu", *COMMUTING), 1),
}
"""Inputs that the rules rely on, by operator."""
NUMBERS = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
"""The attributes of Constant that hold plain numbers, and their types."""


class LintGraph:
    """An ONNX model, read without its external data. Nodes of subgraphs are only in `all_nodes`."""

    def __init__(self, model: ModelProto, folder: Path) -> None:
        """folder: where the external data of the model lies."""
        self.model = model
        self.folder = folder
        self.nodes = list(model.graph.node)
        self.tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.outputs = {value.name for value in model.graph.output}
        self.producers: dict[str, NodeProto] = {}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            self.producers.update(dict.fromkeys(node.output, node))
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
            if node.op_type == "Constant":
                self.tensors.update((node.output[0], tensor) for tensor in read_constant(node))

    @cached_property
    def opset(self) -> int:
        """The version of the standard operators; 0 if the model does not give it."""
        return next((int(each.version) for each in self.model.opset_import if each.domain in DEFAULT_DOMAINS), 0)

    @cached_property
    def constants(self) -> set[str]:
        """The tensors that can be computed before the model runs: constants, and what is computed from them alone."""
        names = set(self.tensors)
        for node in self.nodes:
            read = [name for name in node.input if name]
            if node.op_type == "Constant" or (read and names.issuperset(read)):
                names.update(node.output)
        return names

    @cached_property
    def types(self) -> dict[str, int]:
        """Element types (of TensorProto) by tensor, as far as they can be inferred."""
        types = {name: int(tensor.data_type) for name, tensor in self.tensors.items()}
        model = self.model
        if model.ByteSize() <= MAX_INFERRED_BYTES:
            try:
                model = shape_inference.infer_shapes(model)
            except (shape_inference.InferenceError, RuntimeError, ValueError):
                model = self.model
        for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
            if value.type.tensor_type.elem_type:
                types[value.name] = int(value.type.tensor_type.elem_type)
        return types

    def all_nodes(self) -> Iterator[NodeProto]:
        """Yield the nodes of the graph, of its subgraphs, and of the model's own functions."""
        yield from walk_nodes(self.model.graph)
        for function in self.model.functions:
            yield from function.node

    def of_type(self, *kinds: str) -> list[NodeProto]:
        """Return the nodes of the main graph with one of these operators."""
        return [node for node in self.nodes if node.op_type in kinds and node.domain in DEFAULT_DOMAINS]

    def array(self, name: str) -> Array | None:
        """Read the values of a constant tensor; None for another one, and for data that cannot be read."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        try:
            values = numpy_helper.to_array(tensor, str(self.folder))
        except (OSError, KeyError, ValueError, TypeError, onnx.checker.ValidationError):
            return None
        return None if values.dtype.kind in "OSU" else values

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a constant tensor; None for another one."""
        return tuple(self.tensors[name].dims) if name in self.tensors else None

    def find_dequantizer(self, name: str) -> NodeProto | None:
        """Find the DequantizeLinear that a tensor comes from, directly or through operators that only move numbers."""
        node = self.producers.get(name)
        while node is not None and node.op_type in COMMUTING:
            node = self.producers.get(node.input[0])
        return node if node is not None and node.op_type == "DequantizeLinear" else None

    def is_weight(self, node: NodeProto) -> bool:
        """Return whether a QuantizeLinear or DequantizeLinear reads a constant."""
        return node.input[0] in self.constants


def open_graph(path: Path) -> LintGraph:
    """Read an ONNX file. Raises SourceError for a file that is missing, not ONNX, or without the order of ONNX."""
    try:
        model = onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise SourceError(f"there is no {path}. Give an artifact, or an ONNX file") from None
    except Exception as error:  # protobuf and onnx raise exceptions of their own
        raise SourceError(
            f"{path} is not an ONNX file: {' '.join(str(error).split())[:200]}. Export it again"
        ) from error
    if not model.ir_version or not model.graph.node:
        raise SourceError(f"{path} is not an ONNX file: it holds no graph. Export it again")
    check_order(model.graph, path)
    return LintGraph(model, path.parent)


def check_order(graph: GraphProto, path: Path) -> None:
    """Raise SourceError unless each tensor is written once, and before it is read, so that there is no cycle."""
    written = {value.name for value in (*graph.input, *graph.initializer)}
    words = (
        word for node in walk_nodes(graph) for word in (node.name, node.op_type, node.domain, *node.input, *node.output)
    )
    if not all(isinstance(word, str) for word in (*written, *words)):  # protobuf returns bytes for invalid UTF-8
        raise SourceError(f"{path} is damaged: it holds names that are not text. Export it again")
    for node in graph.node:
        if len(node.input) < LEAST_INPUTS.get(node.op_type, 0) or not node.output:
            raise SourceError(f"{path} is damaged: {name_of(node)} ({node.op_type}) lacks inputs. Export it again")
        unknown = [name for name in node.input if name and name not in written]
        twice = [name for name in node.output if name and name in written]
        if unknown or twice:
            what = f"reads {unknown[0]!r} before it is written" if unknown else f"writes {twice[0]!r} a second time"
            raise SourceError(f"{path} is damaged: {name_of(node)} ({node.op_type}) {what}. Export it again")
        written.update(name for name in node.output if name)


def walk_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Yield the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from walk_nodes(body)


def read_constant(node: NodeProto) -> Iterator[TensorProto]:
    """Read the value of a Constant node, as a tensor; nothing for strings and sparse values."""
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if attribute.name == "value":
            yield value
        elif attribute.name in NUMBERS:
            yield numpy_helper.from_array(np.array(value, NUMBERS[attribute.name]))


def name_of(node: NodeProto) -> str:
    """Return the name of a node; without one, its first output, and without that its operator."""
    return str(node.name or next(iter(node.output), "") or node.op_type)


def attribute_of(node: NodeProto, name: str, default: int) -> int:
    """Return an integer attribute of a node, or its default."""
    return next((int(each.i) for each in node.attribute if each.name == name), default)


def type_name(number: int) -> str:
    """Return the name of an element type, as in onnx.proto: `FLOAT16`."""
    known = number in TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(number)) if known else f"type {number}"


def error(place: NodeProto | str, message: str) -> Problem:
    """Make the problem of a graph that is refused, or of a layer that leaves its 8-bit arithmetic."""
    return "error", place if isinstance(place, str) else name_of(place), message


def warning(place: NodeProto | str, message: str) -> Problem:
    """Make the problem of a graph that is slower than it need be, or of which it is not certain that it is refused."""
    return "warning", place if isinstance(place, str) else name_of(place), message
