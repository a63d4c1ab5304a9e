"""Rules on linear layers and convolutions: which of them run in 8 bits, and what keeps the others in float.

They restate NVIDIA's documentation of Q/DQ placement in TensorRT; none was tried on a GPU for this module.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from export.lint.lint_graph import COMMUTING, LintGraph, Problem, attribute_of, error, name_of, warning
from export.lint.scale_rules import find_type, list_biases, read_scale

CONVOLUTIONS = ("Conv", "ConvTranspose")
LINEAR = ("MatMul", "Gemm", *CONVOLUTIONS)
WEIGHT_ONLY = (TensorProto.INT4, TensorProto.FLOAT4E2M1)
"""Types whose weights TensorRT multiplies with float activations."""
AFTER_CONVOLUTION = frozenset({"BatchNormalization", "Relu", "Clip"})
"""Operators that are fused into the convolution before them."""


@dataclass(frozen=True)
class WeightedNode:
    """A node that multiplies an activation with a constant weight.

    activation, weight: the tensors that it reads. axis: the weight's axis of output channels.
    """

    node: NodeProto
    activation: str
    weight: str
    axis: int


@dataclass(frozen=True)
class QuantizedCount:
    """How many layers multiply in 8 bits.

    quantized, total: numbers of linear layers and convolutions. floating: names of those that are not quantized.
    """

    quantized: int
    total: int
    floating: tuple[str, ...]


def list_weighted(graph: LintGraph) -> Iterator[WeightedNode]:
    """List the linear layers and convolutions with a constant weight."""
    for node in graph.of_type(*LINEAR):
        first, second = node.input[:2]
        if second in graph.constants and first not in graph.constants:
            rank = len(find_shape(graph, second) or (0, 0))
            last = {"MatMul": rank - 1, "Gemm": 1 - attribute_of(node, "transB", 0), "ConvTranspose": 1, "Conv": 0}
            yield WeightedNode(node, first, second, last[node.op_type])
        elif node.op_type == "MatMul" and first in graph.constants and second not in graph.constants:
            yield WeightedNode(node, second, first, len(find_shape(graph, first) or (0, 0)) - 2)


def find_shape(graph: LintGraph, name: str) -> tuple[int, ...] | None:
    """Find the shape of a constant, also behind quantization nodes and operators that only move numbers.

    Their rank is taken to stay the same.
    """
    while name not in graph.tensors:
        node = graph.producers.get(name)
        if node is None or node.op_type not in COMMUTING | {"QuantizeLinear", "DequantizeLinear", "Cast"}:
            return None
        name = node.input[0]
    return graph.shape(name)


def is_quantized(graph: LintGraph, layer: WeightedNode) -> bool:
    """Return whether both sides of a layer are quantized."""
    sides = (layer.activation, layer.weight)
    return all(graph.find_dequantizer(name) is not None for name in sides)


def count_layers(graph: LintGraph) -> QuantizedCount:
    """Count the linear layers and convolutions whose two sides are quantized."""
    layers = list(list_weighted(graph))
    floating = tuple(name_of(layer.node) for layer in layers if not is_quantized(graph, layer))
    return QuantizedCount(len(layers) - len(floating), len(layers), floating)


def check_half_quantized(graph: LintGraph) -> Iterator[Problem]:
    """Find products with one side quantized. A product runs in 8 bits only with both sides quantized. INT4 and FP4
    weights stand alone."""
    weighted = {name_of(layer.node): layer for layer in list_weighted(graph)}
    for node in graph.of_type(*LINEAR):
        sides = [graph.find_dequantizer(name) for name in node.input[:2]]
        dequantizers = [each for each in sides if each is not None]
        if len(dequantizers) != 1:
            continue
        layer = weighted.get(name_of(node))
        is_weight = layer is not None and graph.find_dequantizer(layer.weight) is not None
        if is_weight and find_type(graph, dequantizers[0]) in WEIGHT_ONLY:
            continue
        if layer is None:
            what, missing = "one operand is quantized and the other is not", "both operands or neither"
        elif is_weight:
            what, missing = "the weight is quantized and the input is not", "the input too, or keep the layer in float"
        else:
            what, missing = "the input is quantized and the weight is not", "the weight too, or keep the layer in float"
        yield error(node, f"{node.op_type}: {what}, so that it runs in float. Quantize {missing}")


def check_weight_axis(graph: LintGraph) -> Iterator[Problem]:
    """Check that a weight has one scale per output channel, or a single one."""
    for layer in list_weighted(graph):
        axis, name = layer.axis, layer.weight
        node = graph.producers.get(name)
        while node is not None and node.op_type in ("Transpose", "Identity"):
            order = next((list(each.ints) for each in node.attribute if each.name == "perm"), None)
            if node.op_type == "Transpose":
                rank = len(find_shape(graph, node.input[0]) or ())
                order = order or list(reversed(range(rank)))
                axis = order[axis] if axis < len(order) else axis
            node = graph.producers.get(node.input[0])
        if node is None or node.op_type != "DequantizeLinear" or attribute_of(node, "block_size", 0):
            continue
        scale, shape = read_scale(graph, node), find_shape(graph, node.input[0])
        if scale is None or scale.ndim != 1 or scale.size == 1 or shape is None:
            continue
        scale_axis = attribute_of(node, "axis", 1) % max(len(shape), 1)
        if scale_axis != axis:
            yield error(
                node,
                f"the weight of {name_of(layer.node)} has its scales along axis {scale_axis}, and TensorRT has 8-bit "
                f"kernels for scales per output channel, axis {axis}. Quantize along axis {axis}",
            )


def check_bias(graph: LintGraph) -> Iterator[Problem]:
    """Check that biases stay in float: the kernel adds them to the sums."""
    for node, name in list_biases(graph):
        source = graph.producers.get(name)
        if source is not None and source.op_type in ("QuantizeLinear", "DequantizeLinear"):
            yield error(
                node,
                f"the bias {name} is behind {source.op_type}, and TensorRT adds biases in float. Store it in float",
            )


def check_residual_additions(graph: LintGraph) -> Iterator[Problem]:
    """Find shortcuts that are not quantized. A convolution that is added to a shortcut writes 8 bits only if the
    shortcut is quantized.

    By NVIDIA's recommendation the shortcut comes from DequantizeLinear, and the convolution is added directly.
    """
    for node in graph.of_type("Add"):
        sides = [name for name in node.input if name not in graph.constants]
        quantized = [name for name in sides if graph.find_dequantizer(name) is not None]
        direct = [name for name in sides if name not in quantized and is_added_alone(graph, name)]
        joins = direct or any(is_convolution_output(graph, name) for name in quantized)
        floating = [name for name in sides if name not in (*quantized, *direct)]
        if len(sides) == 2 and joins and (floating or not quantized):
            yield warning(
                node,
                f"Add joins a quantized convolution with {(floating or direct)[0]}, which is not quantized, so that "
                f"the convolution writes floats. Insert QuantizeLinear and DequantizeLinear before this side",
            )


def is_added_alone(graph: LintGraph, name: str) -> bool:
    """Return whether a tensor is the output of a quantized convolution, and one node alone reads it."""
    node = graph.producers.get(name)
    if node is not None and node.op_type == "BatchNormalization":
        node = graph.producers.get(node.input[0])
    alone = len(graph.readers.get(name, [])) == 1 and name not in graph.outputs
    return alone and node is not None and is_quantized_convolution(graph, node)


def is_convolution_output(graph: LintGraph, name: str) -> bool:
    """Return whether a dequantized tensor is the output of a quantized convolution."""
    dequantizer = graph.find_dequantizer(name)
    quantizer = graph.producers.get(dequantizer.input[0]) if dequantizer is not None else None
    node = graph.producers.get(quantizer.input[0]) if quantizer is not None else None
    while node is not None and node.op_type in AFTER_CONVOLUTION:
        node = graph.producers.get(node.input[0])
    return node is not None and is_quantized_convolution(graph, node)


def is_quantized_convolution(graph: LintGraph, node: NodeProto) -> bool:
    """Return whether a node is a convolution with both sides quantized."""
    return node.op_type in CONVOLUTIONS and all(graph.find_dequantizer(name) is not None for name in node.input[:2])
