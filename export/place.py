"""Write a plan into a graph, the way one engine wants it: Q/DQ pairs, and weights in fewer bits."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from export.passes import int4_weights as four_bits
from export.passes.rewrite import Rewrite
from export.rules import Rules
from laconic.errors import CaptureError
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Range, Rounded, Smoothing
from laconic.quantization.qparams import GROUP, quantize_groups

DATA = "model.data"
LARGEST = 1_800_000_000
"""Bytes of one file; protobuf ends at 2 GiB."""


def place(graph: Graph, plan: Plan, rules: Rules, path: Path) -> None:
    """Write `graph` as `plan` says, for the engine of `rules`, to `path`; large weights to `model.data` beside it.

    Raises CaptureError for a tensor that must be quantized and has no range, UnsupportedPrecision for a weight in a
    precision that the engine does not read.
    """
    rewrite = Rewrite(onnx.load(graph.path))
    whole = [layer for layer in graph.layers if plan.precision[layer.node] == "int8" and layer.kind in rules.inputs]
    smooth = {layer.node: plan.smoothing[layer.input] for layer in whole if layer.input in plan.smoothing}
    for tensor, smoothing in plan.smoothing.items():
        readers = [layer.node for layer in whole if layer.input == tensor]
        if readers:
            source = rewrite.smooth(tensor, smoothing.factors, readers, normalization=rules.normalization)
            rewrite.quantize_activation(source, smoothing.limits, readers)
    pairs = sorted(pair for pair in quantized_inputs(rewrite, graph, plan, rules) if pair[1] not in smooth)
    for tensor in dict.fromkeys(tensor for tensor, _ in pairs):
        rewrite.quantize_activation(tensor, range_of(plan, tensor), [node for name, node in pairs if name == tensor])
    if rules.attention and any(layer.kind == "MatMul" for layer in whole):
        for tensor, node, probability in attention_inputs(rewrite):
            limits = Range(0.0, 1.0) if probability else range_of(plan, tensor)
            rewrite.quantize_activation(tensor, limits, [node], symmetric=not probability)
    for layer in graph.layers:
        write_weight(rewrite, layer, plan, rules, smooth.get(layer.node))
    model = rewrite.finish()
    onnx.save(model, path, save_as_external_data=model.ByteSize() > LARGEST, location=DATA)


def write_weight(rewrite: Rewrite, layer: Layer, plan: Plan, rules: Rules, smoothing: Smoothing | None) -> None:
    """Keep a layer's weight as the plan says. smoothing: of what this layer reads."""
    precision = plan.precision[layer.node]
    rounded = plan.weights.get((layer.node, precision))
    if precision == "int4-weight":
        found = rounded or Rounded(*quantize_groups(rewrite.array(layer.weight), GROUP), group=GROUP)
        four_bits.write(rewrite, layer, found, rules.four_bits)
    else:
        factors = None if smoothing is None else smoothing.factors
        rewrite.write_weight(layer, precision, form=rules.weight, factors=factors, rounded=rounded)
    if rounded is not None and rounded.shift is not None:
        rewrite.shift(layer, rounded.shift)


def range_of(plan: Plan, tensor: str) -> Range:
    """The calibrated range of a tensor."""
    if tensor not in plan.ranges:
        raise CaptureError(f"tensor {tensor!r} has no range: calibration did not see it. Calibrate again")
    return plan.ranges[tensor]


def quantized_inputs(rewrite: Rewrite, graph: Graph, plan: Plan, rules: Rules) -> set[tuple[str, str]]:
    """Which nodes read which tensors in INT8: pairs of tensor and node."""
    layers = [layer for layer in graph.layers if plan.precision[layer.node] == "int8" and layer.kind in rules.inputs]
    pairs = {(layer.input, layer.node) for layer in layers}
    results = {behind(rewrite, layer.output, rules.merged) for layer in layers if layer.kind == "Conv"}
    pairs |= set(in_between(rewrite, results, rules))
    for layer in layers:
        if layer.kind in rules.outputs:
            result = behind(rewrite, layer.output, rules.merged)
            pairs |= {(result, node) for node in rewrite.readers(result)}
    return pairs


def behind(rewrite: Rewrite, tensor: str, merged: Iterable[str]) -> str:
    """The tensor behind the operators that the engine merges into the one that makes `tensor`."""
    readers = rewrite.readers(tensor)
    while len(readers) == 1 and rewrite.nodes[readers[0]].op_type in merged and tensor not in rewrite.outputs:
        tensor = rewrite.nodes[readers[0]].output[0]
        readers = rewrite.readers(tensor)
    return tensor


def in_between(rewrite: Rewrite, results: set[str], rules: Rules) -> Iterator[tuple[str, str]]:
    """The inputs of operators without weights that stand between INT8 convolutions, the residual Add above all."""
    results = set(results)
    for name, node in rewrite.nodes.items():
        inputs = [tensor for tensor in node.input if tensor and not rewrite.is_initializer(tensor)]
        if node.op_type in rules.between and inputs and all(tensor in results for tensor in inputs):
            yield from ((tensor, name) for tensor in inputs)
            results.add(behind(rewrite, node.output[0], rules.merged))


def attention_inputs(rewrite: Rewrite) -> Iterator[tuple[str, str, bool]]:
    """What the products of attention read: tensor, node, and whether it is the probabilities.

    Queries times keys, a mask added or not, Softmax, times values.
    """
    for node in rewrite.nodes.values():
        if node.op_type != "Softmax":
            continue
        scores = rewrite.maker(node.input[0])
        if scores is not None and scores.op_type == "Add":
            scores = rewrite.maker(scores.input[0])
        answers = [rewrite.nodes[name] for name in rewrite.readers(node.output[0])]
        if scores is None or scores.op_type != "MatMul" or [each.op_type for each in answers] != ["MatMul"]:
            continue
        if any(rewrite.is_initializer(tensor) for product in (scores, *answers) for tensor in product.input):
            continue
        yield from ((tensor, scores.name, False) for tensor in scores.input)
        yield node.output[0], answers[0].name, True
        yield answers[0].input[1], answers[0].name, False
