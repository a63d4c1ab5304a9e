"""How much each layer suffers from quantization, and in which order to give it bits back."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Precision
from laconic.recipes.stage import PlanContext


def harms(graph: Graph, lowest: Plan, context: PlanContext) -> dict[str, float]:
    """The mean infidelity that each layer causes when it alone is at its lowest precision, by node.

    Cost: one trial a layer.
    """
    candidates = [layer for layer in graph.layers if lowest.precision[layer.node] != "float32"]
    floats: dict[str, Precision] = {layer.node: "float32" for layer in graph.layers}
    harm: dict[str, float] = {}
    with context.steps.step("measure each layer's harm", len(candidates)) as step:
        for layer in candidates:
            alone = replace(lowest, precision=floats | {layer.node: lowest.precision[layer.node]})
            harm[layer.node] = float(1 - context.trial(alone).mean())
            step.advance()
        if harm:
            worst = max(candidates, key=lambda layer: harm[layer.node])
            step.note = f"worst: {worst.module}, {harm[worst.node]:.2g}"
    return harm


def flights(layers: Sequence[Layer], lowest: Plan, harm: Mapping[str, float]) -> tuple[tuple[Plan, ...], ...]:
    """Three flights of plans, for a goal that is low, high, and the highest.

    In the first the layers leave INT8 arithmetic one after the other, most harm per multiplication first, while all
    weights stay in INT8. In the second their weights go to 16 bits as they leave, and those of the embeddings, which
    cost no time, are there from the start. The third is the graph as it was.
    """
    counted = {layer.node: layer.parameters for layer in layers}
    tables = [layer.node for layer in layers if layer.kind == "Gather" and layer.node in harm]
    order = sorted((node for node in harm if node not in tables), key=lambda node: -harm[node] / counted[node])
    wide: dict[str, Precision] = dict.fromkeys(tables, "float16-weight")
    floats: dict[str, Precision] = {layer.node: "float32" for layer in layers}
    return (
        flight(lowest, order, "int8-weight"),
        flight(replace(lowest, precision={**lowest.precision, **wide}), order, "float16-weight"),
        (replace(lowest, precision=floats),),
    )


def flight(lowest: Plan, order: Sequence[str], precision: Precision) -> tuple[Plan, ...]:
    """The layers lifted to `precision` one after the other."""
    plans = [lowest]
    for node in order:
        plans.append(replace(lowest, precision={**plans[-1].precision, node: precision}))
    return tuple(plans)
