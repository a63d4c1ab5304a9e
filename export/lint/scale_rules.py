"""Rules on QuantizeLinear and DequantizeLinear: types, scales, zero points, granularity.

They restate NVIDIA's documentation of explicit quantization in TensorRT; none was tried on a GPU for this module.
"""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from export.lint.lint_graph import LintGraph, Problem, attribute_of, error, name_of, type_name, warning
from laconic.arrays import Array

QUANTIZED_TYPES = (TensorProto.INT8, TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.FLOAT4E2M1)
"""The element types of quantized tensors that TensorRT takes on a GPU."""
INT4_BLOCKS = (64, 128)
"""Numbers that share a scale in INT4, as TensorRT takes them."""
SCALE_SOURCES = frozenset({"Cast", "Constant", "DequantizeLinear", "Identity"})
"""What may compute a constant scale: FP4 has quantized scales."""


def list_quantizers(graph: LintGraph) -> list[NodeProto]:
    """List every QuantizeLinear, and every DequantizeLinear that is not behind one: each Q/DQ pair once."""
    pairs = []
    for node in graph.of_type("QuantizeLinear", "DequantizeLinear"):
        producer = graph.producers.get(node.input[0])
        if node.op_type == "QuantizeLinear" or producer is None or producer.op_type != "QuantizeLinear":
            pairs.append(node)
    return pairs


def find_type(graph: LintGraph, node: NodeProto) -> int:
    """Find the element type that a node quantizes to, or dequantizes from; 0 where it is not known."""
    if node.op_type == "DequantizeLinear":
        return graph.types.get(node.input[0], 0)
    if len(node.input) > 2 and node.input[2]:
        return graph.types.get(node.input[2], 0)
    return attribute_of(node, "output_dtype", 0) or TensorProto.UINT8


def read_scale(graph: LintGraph, node: NodeProto) -> Array | None:
    """Read the scales of a node as float64; None where they are not constant."""
    scales = graph.array(node.input[1])
    return None if scales is None else scales.astype(np.float64)


def list_biases(graph: LintGraph) -> Iterator[tuple[NodeProto, str]]:
    """List the nodes that add a bias, and the bias: convolutions, Gemm, and Add of a constant behind MatMul."""
    for node in graph.of_type("Gemm", "Conv", "ConvTranspose"):
        yield from ((node, name) for name in node.input[2:] if name)
    for node in graph.of_type("Add"):
        producers = [graph.producers.get(name) for name in node.input]
        for name, other in zip(node.input, reversed(producers), strict=True):
            if name in graph.constants and other is not None and other.op_type == "MatMul":
                yield node, name


def check_quantized_type(graph: LintGraph) -> Iterator[Problem]:
    """Check the types of quantized tensors: on a GPU they are INT8, FP8 (E4M3) and, for weights, INT4 and FP4. Unsigned
    types are for DLA."""
    biases = {name for _, name in list_biases(graph)}
    for node in list_quantizers(graph):
        kind = find_type(graph, node)
        if not kind or node.output[0] in biases:
            continue
        if kind not in QUANTIZED_TYPES:
            implied = "" if node.op_type == "DequantizeLinear" or any(node.input[2:]) else " (it has no zero point)"
            yield error(
                node,
                f"{node.op_type} uses {type_name(kind)}{implied}, and TensorRT on a GPU takes INT8 and FLOAT8E4M3FN. "
                f"Quantize to signed INT8 with zero point 0",
            )
        elif kind == TensorProto.INT4 and node.op_type == "QuantizeLinear" and not graph.is_weight(node):
            yield error(
                node, "an activation is quantized to INT4, which TensorRT takes for weights only. Quantize it to INT8"
            )


def check_zero_points(graph: LintGraph) -> Iterator[Problem]:
    """Check that quantization is symmetric."""
    for node in list_quantizers(graph):
        stored = graph.array(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        points = np.zeros(1) if stored is None else stored.astype(np.float64)
        if points.any():
            yield error(
                node,
                f"{node.op_type} has the zero point {points[points != 0][0]:g}, and TensorRT's quantization is "
                f"symmetric. Quantize to signed INT8 with zero point 0",
            )


def check_dynamic_scales(graph: LintGraph) -> Iterator[Problem]:
    """Check that scales and zero points are constants of the engine."""
    for node in list_quantizers(graph):
        for name in filter(None, node.input[1:]):
            source = graph.producers.get(name)
            if name not in graph.constants or (source is not None and source.op_type not in SCALE_SOURCES):
                yield error(
                    node,
                    f"{name} of {node.op_type} is computed when the model runs, and TensorRT needs a constant. "
                    f"Calibrate, and store the scale as an initializer (quantize.static)",
                )


def check_scales(graph: LintGraph) -> Iterator[Problem]:
    """Check that scales are positive and finite."""
    for node in list_quantizers(graph):
        scale = read_scale(graph, node)
        if scale is not None and not (np.isfinite(scale) & (scale > 0)).all():
            worst = scale[~(np.isfinite(scale) & (scale > 0))][0]
            yield error(
                node,
                f"a scale of {node.op_type} is {worst:g}, and all must be positive and finite. Calibrate again; in "
                f"FP16 a scale below 6e-8 is zero, so keep this one in FP32",
            )


def check_pairs(graph: LintGraph) -> Iterator[Problem]:
    """Find pairs with two scales. Such a pair computes what the graph says, and multiplies by their ratio."""
    for node in graph.of_type("DequantizeLinear"):
        producer = graph.producers.get(node.input[0])
        if producer is None or producer.op_type != "QuantizeLinear":
            continue
        first, second = read_scale(graph, producer), read_scale(graph, node)
        if first is None or second is None or not first.size or not second.size:
            continue
        if not np.array_equal(first.ravel(), second.ravel()):
            yield warning(
                node,
                f"{name_of(producer)} and {name_of(node)} have different scales ({first.flat[0]:g} and "
                f"{second.flat[0]:g}): the pair multiplies by their ratio. Use one initializer for both",
            )


def check_activation_granularity(graph: LintGraph) -> Iterator[Problem]:
    """Check that INT8 and FP8 activations have one scale per tensor."""
    for node in graph.of_type("QuantizeLinear"):
        scale = read_scale(graph, node)
        if graph.is_weight(node) or scale is None or scale.size == 1 or attribute_of(node, "block_size", 0):
            continue
        yield error(
            node,
            f"an activation has {scale.size} scales, and TensorRT takes one per tensor for activations. Calibrate the "
            f"tensor as a whole; SmoothQuant (smoothquant: true) evens out its channels",
        )


def check_weight_quantizers(graph: LintGraph) -> Iterator[Problem]:
    """Find weights that are stored in float. TensorRT quantizes such a weight while it builds, but the file is four
    times as large."""
    for node in graph.of_type("QuantizeLinear"):
        if graph.is_weight(node):
            yield warning(
                node,
                f"the weight {node.input[0]} is stored in float and quantized by {name_of(node)}. Store the integers, "
                f"with DequantizeLinear alone",
            )


def check_int4_blocks(graph: LintGraph) -> Iterator[Problem]:
    """Check that INT4 weights have a scale per block of 64 or 128 along one of their last two axes."""
    for node in graph.of_type("DequantizeLinear"):
        shape = graph.shape(node.input[0])
        if find_type(graph, node) != TensorProto.INT4 or not shape:
            continue
        size, axis = attribute_of(node, "block_size", 0), attribute_of(node, "axis", 1)
        axis += len(shape) if axis < 0 else 0
        if size not in INT4_BLOCKS:
            what = f"has blocks of {size}" if size else "has no blocks"
            expected = f"blocks of {' or '.join(map(str, INT4_BLOCKS))}"
        elif axis not in (len(shape) - 1, len(shape) - 2):
            what, expected = f"has its blocks along axis {axis} of {len(shape)}", "one of the last two axes"
        elif shape[axis] % size:
            what, expected = f"has {shape[axis]} numbers along axis {axis}", f"a multiple of the block size {size}"
        else:
            continue
        yield error(
            node,
            f"the INT4 weight {node.input[0]} {what}, and TensorRT takes {expected}. Quantize again (group_size: 128), "
            f"or use 8 bits",
        )
