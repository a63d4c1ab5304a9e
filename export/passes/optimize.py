"""Optimization of a float graph by onnxscript: constants folded, operations without effect removed; names of nodes."""

import math
from collections import Counter

import numpy as np
import onnx_ir as ir
from onnxscript import optimizer

ABSOLUTE, RELATIVE = 1e-8, 1e-5
"""How far from 0 and from 1 a number may be that onnxscript's rules take for it (0.7)."""
RESHAPE_OPSET = 14
"""The first opset whose Reshape has the attribute `allowzero`, which onnxscript writes into any graph."""
NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
"""The number with which each operator has no effect."""


def name_nodes(graph: ir.Graph) -> None:
    """Give each node a name of its own, which normalization keeps: in graphs of other frameworks a node may have none,
    or share it with others. The optimizer would name it "node"."""
    names: Counter[str] = Counter()
    for node in graph.all_nodes():
        stem = node.name or node.op_type
        names[stem] += 1
        node.name = stem if names[stem] == 1 else f"{stem}_{names[stem] - 1}"


def optimize(model: ir.Model) -> None:
    """Optimize a model in place, as torch's exporter does, but remove only operations that have no effect at all.

    onnxscript takes `x + 1e-10` for `x + 0` and removes it, which many a logarithm of an energy relies on: silence then
    becomes minus infinity.
    """
    optimizer.inline(model)
    optimizer.fold_constants(model)
    for node in model.graph.all_nodes():
        if node.domain in ("", "ai.onnx") and node.op_type in NEUTRAL:
            keep_effect(node, NEUTRAL[node.op_type])
    optimizer.optimize(model)
    if model.opset_imports.get("", RESHAPE_OPSET) < RESHAPE_OPSET:
        for node in model.graph.all_nodes():
            if node.op_type == "Reshape":  # without it, a 0 copies a size: no tensor here has an axis of size 0
                node.attributes.pop("allowzero", None)


def keep_effect(node: ir.Node, neutral: float) -> None:
    """Give a scalar that is near the neutral number, and not the same, an axis: the rules match scalars alone.

    The result of the operation keeps its shape, unless all operands are scalars: these are left as they are.
    """
    for place, value in enumerate(node.inputs):
        array = None if value is None or value.const_value is None else value.const_value.numpy()
        if value is None or array is None or array.ndim or array.dtype.kind != "f":
            continue
        number, others = float(array), [other for other in node.inputs if other is not value and other is not None]
        near = number != neutral and math.isclose(number, neutral, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        if near and not any(other.shape is not None and len(other.shape) == 0 for other in others):
            node.replace_input_with(place, make_constant(node, np.reshape(array, (1,)), f"{value.name}.vector"))


def make_constant(node: ir.Node, array: np.ndarray, name: str) -> ir.Value:
    """Make a constant that the node can read, in the graph that it is in."""
    constant = ir.node("Constant", [], attributes={"value": ir.tensor(array, name=name)})
    constant.outputs[0].name = name
    constant.outputs[0].const_value = ir.tensor(array, name=name)
    graph = node.graph
    assert graph is not None
    graph.insert_before(node, constant)
    return constant.outputs[0]
