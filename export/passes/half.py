"""Half precision: a graph rewritten so that its own types say FP16 or BF16, for engines that run it as it is typed.

Inputs and outputs of the graph stay FP32. Nodes around tensors that would overflow, and operators that an engine should
compute in FP32, keep FP32, with casts at the borders.
"""

from collections.abc import Collection
from typing import Literal

import ml_dtypes
import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from export.passes.opset import raise_opset
from laconic.arrays import Array
from laconic.errors import UnsupportedPrecision

HalfType = Literal["float16", "bfloat16"]
ELEMENT_TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
LIMITS = {"float16": (65504.0, 2.0**-24), "bfloat16": (3.3895313892515355e38, 2.0**-133)}
"""The largest number of each type, and the smallest above 0."""
FLOAT32_INPUTS = {"Resize": frozenset({1, 2})}
"""Inputs that are FP32 whatever the type of the others, by operator."""
BFLOAT16_OPSET = 22
"""The first opset in which convolutions and poolings take BF16."""
TYPED_OUTPUTS = frozenset({"ConstantOfShape", "EyeLike", "RandomNormalLike", "Range"})
"""Operators whose outputs are FP32 because an attribute or an input of theirs says so; they stay as they are."""


def convert_to_half(
    model: ModelProto, half: HalfType, *, overflow: Collection[str] = (), float32: Collection[str] = ()
) -> None:
    """Rewrite a model in place so that its float tensors are of type `half`.

    overflow: tensors that stay FP32, with the nodes that read or write them. float32: operators that stay FP32. Raises
    UnsupportedPrecision for a graph with control flow, or with an operator that has no BF16 in its opset.
    """
    if half == "bfloat16":
        raise_opset(model, BFLOAT16_OPSET, "arithmetic in BF16")
    _HalfRewriter(model, half, frozenset(overflow), frozenset(float32)).rewrite()


class _HalfRewriter:
    """The rewriting of one graph: follows the type of each tensor, and inserts casts where reader and writer differ."""

    def __init__(self, model: ModelProto, half: HalfType, overflow: frozenset[str], float32: frozenset[str]) -> None:
        self.graph: GraphProto = model.graph
        self.half, self.element = half, ELEMENT_TYPES[half]
        self.overflow, self.float32 = overflow, float32
        self.weights = {tensor.name: tensor for tensor in self.graph.initializer}
        self.floats = find_float_tensors(model)
        self.halves: set[str] = set()
        """Tensors that are of type `half` now."""
        self.renamed: dict[str, str] = {}
        """Outputs of casts that became superfluous, and what stands for them."""
        self.nodes: list[NodeProto] = []
        self.casts: set[str] = set()

    def rewrite(self) -> None:
        """Rewrite the nodes in their order, then the outputs and the initializers."""
        for node in self.graph.node:
            if any(
                attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
                for attribute in node.attribute
            ):
                raise UnsupportedPrecision(
                    f"{node.name} ({node.op_type}) is control flow, whose body cannot be converted to {self.half}. "
                    f"Export the model without it, or for a target in FP32 (--target cpu)"
                )
            self.rewrite_node(node)
        for output in self.graph.output:
            self.write_output(output.name)
        read = {name for node in self.nodes for name in node.input}
        kept = [tensor for tensor in self.weights.values() if tensor.name in read]
        del self.graph.node[:], self.graph.initializer[:], self.graph.value_info[:]
        self.graph.node.extend(self.nodes)
        self.graph.initializer.extend(kept)

    def rewrite_node(self, node: NodeProto) -> None:
        """Convert a node, or leave it in FP32, with casts before it where its inputs are of the other type."""
        copy = NodeProto()
        copy.CopyFrom(node)
        for slot, name in enumerate(copy.input):
            copy.input[slot] = self.renamed.get(name, name)
        if self.is_cast_to_float(copy):
            self.rewrite_cast(copy)
            return
        converted = self.is_converted(node)
        stay = FLOAT32_INPUTS.get(node.op_type, frozenset())
        for slot, name in enumerate(copy.input):
            if name in self.floats or name in self.halves:
                copy.input[slot] = self.read(name, half=converted and slot not in stay)
        self.nodes.append(copy)
        if converted:
            self.halves.update(name for name in copy.output if name in self.floats)

    def is_converted(self, node: NodeProto) -> bool:
        """Return whether a node computes in half precision."""
        return not (
            node.op_type in self.float32
            or node.op_type in TYPED_OUTPUTS
            or any(name in self.overflow for name in (*node.input, *node.output))
            or any(node.name.startswith(f"{tensor}/") for tensor in self.overflow)
        )

    def is_cast_to_float(self, node: NodeProto) -> bool:
        """Return whether a node casts to FP32, and need not."""
        return node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT and self.is_converted(node)

    def rewrite_cast(self, node: NodeProto) -> None:
        """Rewrite a cast: to half precision in place of FP32; where the input is that already, remove the cast."""
        source, output = node.input[0], node.output[0]
        if self.element_type(source) == self.element:
            self.renamed[output] = source
            self.halves.add(source)
            return
        (to,) = (attribute for attribute in node.attribute if attribute.name == "to")
        to.i = self.element
        self.nodes.append(node)
        self.halves.add(output)

    def element_type(self, name: str) -> int | None:
        """Return the element type of a tensor as it is now, as far as it matters here."""
        if name in self.halves:
            return self.element
        return self.weights[name].data_type if name in self.weights else None

    def read(self, name: str, *, half: bool) -> str:
        """Return the tensor in the type that a reader needs: itself, a converted initializer, or the result of a
        cast."""
        if (name in self.halves) == half:
            return name
        result = f"{name}/{self.half if half else 'float32'}"
        if name in self.weights:
            if result not in self.weights:
                array = numpy_helper.to_array(self.weights[name])
                self.weights[result] = numpy_helper.from_array(
                    to_half(array, self.half) if half else array.astype(np.float32), result
                )
        elif result not in self.casts:
            to = self.element if half else TensorProto.FLOAT
            self.nodes.append(helper.make_node("Cast", [name], [result], result, to=to))
            self.casts.add(result)
        return result

    def write_output(self, name: str) -> None:
        """Give an output of the graph its FP32 back, under its own name."""
        source = self.renamed.get(name, name)
        if source not in self.halves:
            return
        inner = source
        if source == name:
            inner = f"{name}/{self.half}"
            for node in self.nodes:
                for names in (node.input, node.output):
                    for slot, each in enumerate(names):
                        if each == name:
                            names[slot] = inner
        self.nodes.append(helper.make_node("Cast", [inner], [name], f"{name}/cast", to=TensorProto.FLOAT))


def find_float_tensors(model: ModelProto) -> set[str]:
    """Find the names of the FP32 tensors: inputs, initializers and results."""
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    values = (*graph.value_info, *graph.input, *graph.output)
    names = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    return names | {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}


def to_half(array: Array, half: HalfType) -> Array:
    """Round to half precision. Numbers beyond its range become its largest, and scales, all of which are above 0, stay
    so."""
    dtype = np.dtype(np.float16) if half == "float16" else np.dtype(ml_dtypes.bfloat16)
    largest, smallest = LIMITS[half]
    least = smallest if array.size and array.min() > 0 else -largest
    return np.clip(array, least, largest).astype(dtype)
