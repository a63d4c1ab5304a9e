"""Write a plan into a graph, the way one engine wants it: Q/DQ pairs, and weights in fewer bits."""

from collections.abc import Iterable
from pathlib import Path

import onnx

from export.rewrite import Rewrite
from export.rules import Rules
from laconic.errors import CaptureError
from laconic.graph import Graph
from laconic.plan import Plan


def place(graph: Graph, plan: Plan, rules: Rules, path: Path) -> None:
    """Write `graph` as `plan` says, for the engine of `rules`, to `path`.

    Raises CaptureError for a tensor that must be quantized and has no range.
    """
    rewrite = Rewrite(onnx.load(graph.path))
    for name, array in plan.weights.items():
        rewrite.set_initializer(name, array)
    quantized = sorted(quantized_inputs(rewrite, graph, plan, rules))
    for tensor in dict.fromkeys(tensor for tensor, _ in quantized):
        if tensor not in plan.ranges:
            raise CaptureError(f"tensor {tensor!r} has no range: calibration did not see it. Calibrate again")
        consumers = [node for name, node in quantized if name == tensor]
        rewrite.quantize_activation(tensor, plan.ranges[tensor], consumers, symmetric=rules.symmetric)
    for layer in graph.layers:
        rewrite.write_weight(layer, plan.precision[layer.node])
    onnx.save(rewrite.finish(), path)


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


def in_between(rewrite: Rewrite, results: set[str], rules: Rules) -> Iterable[tuple[str, str]]:
    """The inputs of operators without weights that stand between INT8 convolutions, the residual Add above all."""
    results = set(results)
    for name, node in rewrite.nodes.items():
        inputs = [tensor for tensor in node.input if tensor and not rewrite.is_initializer(tensor)]
        if node.op_type in rules.between and inputs and all(tensor in results for tensor in inputs):
            yield from ((tensor, name) for tensor in inputs)
            results.add(behind(rewrite, node.output[0], rules.merged))
