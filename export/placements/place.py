"""Q/DQ placement: write a quantization plan into a graph by the rules of an engine."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx

from export.capture.model_file import save_model
from export.passes.fused_attention import find_attention, fuse_attention, infer_shapes
from export.passes.grouped_weights import write_grouped_weight
from export.passes.half import convert_to_half
from export.passes.low_bit_weights import write_float8_weight, write_stored_weights
from export.passes.rewrite import GraphRewriter
from export.passes.rounded_cache import round_cache
from export.passes.scaled_inputs import divide_input
from export.placements.rules import PlacementRules
from export.placements.split_decoder import has_decoder
from laconic.errors import CaptureError
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, QuantizedWeight, Range, Smoothing
from laconic.quantization.qparams import ActivationType, quantize_in_groups
from laconic.runtimes.engine_spec import AXIS_PROPERTY
from laconic.runtimes.runtime import Compute

ZERO = "relu/zero"
"""The name of the constant in a Max that stands for a Relu."""


def place(
    graph: Graph,
    plan: Plan,
    rules: PlacementRules,
    path: Path,
    compute: Compute = "float32",
    overflow: Collection[str] = (),
) -> None:
    """Quantize `graph` by `plan` for the engine of `rules`, and write it to `path`; large weights to a file beside it
    with the suffix `.data`.

    compute: the arithmetic of the layers that are not quantized. overflow: tensors that exceed FP16. Raises
    CaptureError for a tensor to quantize that has no range, UnsupportedPrecision for a weight in a precision that the
    engine does not read.
    """
    rewrite = GraphRewriter(onnx.load(graph.path))
    fused_attention = rules.fused_attention and not has_decoder(graph)
    shapes = infer_shapes(rewrite.model) if fused_attention else {}  # before what it follows is rewritten
    dtype: ActivationType = "int8" if rules.signed else "uint8"
    whole = [layer for layer in graph.layers if plan.precision[layer.node] == "int8" and layer.kind in rules.inputs]
    smooth = smooth_inputs(rewrite, whole, plan, rules, dtype)
    pairs = sorted(pair for pair in quantized_inputs(rewrite, graph, plan, rules) if pair[1] not in smooth)
    for tensor in dict.fromkeys(tensor for tensor, _ in pairs):
        nodes = [node for name, node in pairs if name == tensor]
        rewrite.quantize_activation(tensor, range_of(plan, tensor), nodes, dtype)
    if rules.attention and plan.attention and any(layer.kind == "MatMul" for layer in whole):
        for tensor, node, probability in attention_inputs(rewrite):
            limits = Range(0.0, 1.0) if probability else range_of(plan, tensor)
            rewrite.quantize_activation(tensor, limits, [node], "uint8" if probability else "int8")
    float8 = [layer for layer in graph.layers if plan.precision[layer.node] == "float8"]
    for tensor in dict.fromkeys(layer.input for layer in float8):
        nodes = [layer.node for layer in float8 if layer.input == tensor]
        rewrite.quantize_activation(tensor, range_of(plan, tensor), nodes, "float8")
    scale_inputs(rewrite, graph, plan)
    for layer in graph.layers:
        write_weight(rewrite, layer, plan, rules, smooth.get(layer.node))
    if plan.int8_kv_cache:
        round_cache(rewrite, int4_values=plan.int4_value_cache)
    if fused_attention:
        fuse_attention(rewrite, shapes)
    model = rewrite.finish()
    if rules.relu_as_max:
        replace_relu(model.graph)
    if rules.explicit:
        write_axis_bounds(model, graph)
    if rules.explicit and compute in ("float16", "bfloat16"):
        convert_to_half(model, compute, overflow=overflow, float32=rules.float32)
    save_model(model, path)


def smooth_inputs(
    rewrite: GraphRewriter, layers: Sequence[Layer], plan: Plan, rules: PlacementRules, dtype: ActivationType
) -> dict[str, Smoothing]:
    """Smooth and quantize the inputs of layers where the plan says so; return the smoothing by node."""
    smooth = [layer for layer in layers if layer.input in plan.smoothing]
    # In the order of the graph: that of the plan depends on whether it was calibrated now or comes from the cache.
    for tensor in dict.fromkeys(layer.input for layer in smooth):
        smoothing = plan.smoothing[tensor]
        readers = [layer.node for layer in layers if layer.input == tensor]
        source = divide_input(rewrite, tensor, smoothing.factors, readers, normalization=rules.normalization)
        rewrite.quantize_activation(source, smoothing.limits, readers, dtype)
    return {layer.node: plan.smoothing[layer.input] for layer in smooth}


def scale_inputs(rewrite: GraphRewriter, graph: Graph, plan: Plan) -> None:
    """Divide the inputs of layers whose weights in 4 bits were multiplied before they were rounded (AWQ)."""
    scaled = [layer for layer in graph.layers if (layer.node, plan.precision[layer.node]) in plan.weights]
    scaled = [x for x in scaled if plan.precision[x.node] == "int4-weight" and x.input in plan.smoothing]
    for tensor in dict.fromkeys(layer.input for layer in scaled):
        readers = [layer.node for layer in scaled if layer.input == tensor]
        divide_input(rewrite, tensor, plan.smoothing[tensor].factors, readers, normalization=True)


def replace_relu(graph: onnx.GraphProto) -> None:
    """Write Max with 0 for each Relu that reads a product without a bias."""
    products = {name for node in graph.node if node.op_type == "MatMul" for name in node.output}
    activations = [node for node in graph.node if node.op_type == "Relu" and node.input[0] in products]
    for node in activations:
        node.op_type = "Max"
        node.input.append(ZERO)
    if activations:
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.float32), ZERO))


def write_axis_bounds(model: onnx.ModelProto, graph: Graph) -> None:
    """Write the bounds of the dynamic axes into the model's metadata, where TensorRT's engine looks for them."""
    bounds = {axis: limits for spec in graph.inputs for axis, limits in spec.bounds.items()}
    for axis, (low, high) in sorted(bounds.items()):
        model.metadata_props.add(key=f"{AXIS_PROPERTY}{axis}", value=f"{low} {high}")


def write_weight(
    rewrite: GraphRewriter, layer: Layer, plan: Plan, rules: PlacementRules, smoothing: Smoothing | None
) -> None:
    """Write a layer's weight in the plan's precision. smoothing: of the layer's input."""
    if layer.stored:
        write_stored_weights(rewrite, layer, rules.precision_of_stored(layer, plan.precision[layer.node]))
        return
    precision = plan.precision[layer.node]
    rounded = plan.weights.get((layer.node, precision))
    if precision == "int4-weight":
        weight = rounded
        if weight is None:
            integers, scales, _ = quantize_in_groups(rewrite.array(layer.weight), rules.int4_group_size)
            weight = QuantizedWeight(integers, scales, group_size=rules.int4_group_size)
        write_grouped_weight(rewrite, layer, weight, 4, rules.form_of(weight, 4))
    elif precision == "int8-weight" and rounded is not None and rounded.group_size is not None:
        write_grouped_weight(rewrite, layer, rounded, 8, rules.form_of(rounded, 8))
    elif precision == "float8":
        write_float8_weight(rewrite, layer)
    else:
        factors = None if smoothing is None else smoothing.factors
        rewrite.write_weight(layer, precision, form=rules.weight, factors=factors, rounded=rounded)
    if rounded is not None and rounded.bias_correction is not None:
        rewrite.add_to_bias(layer, rounded.bias_correction)


def range_of(plan: Plan, tensor: str) -> Range:
    """Return the calibrated range of a tensor."""
    if tensor not in plan.ranges:
        raise CaptureError(f"tensor {tensor!r} has no range: calibration did not see it. Calibrate again")
    return plan.ranges[tensor]


def quantized_inputs(rewrite: GraphRewriter, graph: Graph, plan: Plan, rules: PlacementRules) -> set[tuple[str, str]]:
    """Return the activations to quantize: pairs of a tensor and a node that reads it in INT8."""
    layers = [layer for layer in graph.layers if plan.precision[layer.node] == "int8" and layer.kind in rules.inputs]
    pairs = {(layer.input, layer.node) for layer in layers}
    results = {skip_fused(rewrite, layer.output, rules.fused) for layer in layers if layer.kind == "Conv"}
    pairs |= set(inputs_between(rewrite, results, rules))
    for layer in layers:
        if layer.kind in rules.outputs:
            result = skip_fused(rewrite, layer.output, rules.fused)
            pairs |= {(result, node) for node in rewrite.readers(result)}
    return pairs


def skip_fused(rewrite: GraphRewriter, tensor: str, fused: Iterable[str]) -> str:
    """Find the tensor after the operators that the engine fuses into the producer of `tensor`."""
    readers = rewrite.readers(tensor)
    while len(readers) == 1 and rewrite.nodes[readers[0]].op_type in fused and tensor not in rewrite.outputs:
        tensor = rewrite.nodes[readers[0]].output[0]
        readers = rewrite.readers(tensor)
    return tensor


def inputs_between(rewrite: GraphRewriter, results: set[str], rules: PlacementRules) -> Iterator[tuple[str, str]]:
    """Yield the inputs of operators without weights between INT8 convolutions, such as residual additions."""
    results = set(results)
    for name, node in rewrite.nodes.items():
        inputs = [tensor for tensor in node.input if tensor and not rewrite.is_initializer(tensor)]
        if node.op_type in rules.between and inputs and all(tensor in results for tensor in inputs):
            fused = find_fused_input(rewrite, node) if rules.fused_add else ""
            yield from ((tensor, name) for tensor in inputs if tensor != fused)
            results.add(skip_fused(rewrite, node.output[0], rules.fused))


def find_fused_input(rewrite: GraphRewriter, node: onnx.NodeProto) -> str:
    """Find the input of an addition that comes straight from a convolution, which computes the addition as well; empty
    where there is none. Of two the one that is computed last is taken."""
    if node.op_type != "Add":
        return ""
    order = list(rewrite.nodes)
    convolutions = [
        (order.index(producer.name), tensor)
        for tensor in node.input
        for producer in [rewrite.producer(tensor)]
        if producer is not None and producer.op_type == "Conv" and rewrite.readers(tensor) == [node.name]
    ]
    return max(convolutions, default=(0, ""))[1]


def has_attention(graph: Graph) -> bool:
    """Return whether there are products of attention in the form that is quantized."""
    return next(attention_inputs(GraphRewriter(onnx.load(graph.path, load_external_data=False))), None) is not None


def attention_inputs(rewrite: GraphRewriter) -> Iterator[tuple[str, str, bool]]:
    """Yield the inputs of attention's matrix products: tensor, node, and whether it holds probabilities."""
    for attention in find_attention(rewrite):
        yield from ((tensor, attention.scores.name, False) for tensor in attention.scores.input)
        yield attention.softmax.output[0], attention.values.name, True
        yield attention.values.input[1], attention.values.name, False
