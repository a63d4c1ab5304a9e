"""Sensitivity analysis: how much quantizing each layer costs, and the precision ladder that follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Precision
from laconic.recipes.stage import PlanContext


def measure_sensitivity(graph: Graph, lowest: Plan, context: PlanContext) -> dict[str, float]:
    """The sensitivity of each layer: the mean infidelity when it alone is quantized, by node.

    lowest: each layer's lowest precision. The cost is one trial per layer.
    """
    candidates = [layer for layer in graph.layers if lowest.precision[layer.node] != "float32"]
    floats: dict[str, Precision] = {layer.node: "float32" for layer in graph.layers}
    sensitivity: dict[str, float] = {}
    with context.steps.step("measure each layer's sensitivity", len(candidates)) as step:
        for layer in candidates:
            alone = replace(lowest, precision=floats | {layer.node: lowest.precision[layer.node]})
            sensitivity[layer.node] = float(1 - context.trial(alone).mean())
            step.advance()
        if sensitivity:
            worst = max(candidates, key=lambda layer: sensitivity[layer.node])
            step.note = f"worst: {worst.module}, {sensitivity[worst.node]:.2g}"
    return sensitivity


def make_rungs(layers: Sequence[Layer], lowest: Plan, sensitivity: Mapping[str, float]) -> tuple[tuple[Plan, ...], ...]:
    """The three rungs of the precision ladder.

    On the first, layers leave INT8 arithmetic one after the other, the most sensitive per weight first, while
    all weights stay in INT8. On the second, their weights go to 16 bits as they leave; those of the embeddings, which
    cost no time, have 16 bits from the start. The third is the float graph.
    """
    parameters = {layer.node: layer.parameters for layer in layers}
    tables = [layer.node for layer in layers if layer.kind == "Gather" and layer.node in sensitivity]
    others = (node for node in sensitivity if node not in tables)
    order = sorted(others, key=lambda node: -sensitivity[node] / parameters[node])
    wide: dict[str, Precision] = dict.fromkeys(tables, "float16-weight")
    floats: dict[str, Precision] = {layer.node: "float32" for layer in layers}
    return (
        make_rung(lowest, order, "int8-weight"),
        make_rung(replace(lowest, precision={**lowest.precision, **wide}), order, "float16-weight"),
        (replace(lowest, precision=floats),),
    )


def make_rung(lowest: Plan, order: Sequence[str], precision: Precision) -> tuple[Plan, ...]:
    """A rung of plans that raise the layers to `precision` one after the other, in this order."""
    plans = [lowest]
    for node in order:
        plans.append(replace(lowest, precision={**plans[-1].precision, node: precision}))
    return tuple(plans)
