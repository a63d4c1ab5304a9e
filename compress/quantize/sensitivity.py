"""How much each layer suffers from quantization, and in which order to give it bits back."""

from collections.abc import Mapping, Sequence

from laconic.graph import Graph, Layer
from laconic.plan import Plan, Precision, Range
from laconic.stage import PlanContext


def harms(
    graph: Graph, lowest: Mapping[str, Precision], ranges: Mapping[str, Range], context: PlanContext
) -> dict[str, float]:
    """The mean infidelity that each layer causes when it alone is at its lowest precision, by node.

    Cost: one trial a layer.
    """
    candidates = [layer for layer in graph.layers if lowest[layer.node] != "float32"]
    floats: dict[str, Precision] = {layer.node: "float32" for layer in graph.layers}
    harm = {}
    with context.steps.step("measure each layer's harm", len(candidates)) as step:
        for layer in candidates:
            plan = Plan(floats | {layer.node: lowest[layer.node]}, ranges)
            harm[layer.node] = float(1 - context.trial(plan).mean())
            step.advance()
        if harm:
            worst = max(harm, key=lambda node: harm[node])
            step.note = f"worst: {next(x.module for x in candidates if x.node == worst)}, {harm[worst]:.2g}"
    return harm


def rungs(
    layers: Sequence[Layer], lowest: Mapping[str, Precision], harm: Mapping[str, float]
) -> list[dict[str, Precision]]:
    """Precisions from the fastest to the most faithful.

    First the layers leave INT8 arithmetic one after the other, most harm per multiplication first, their weights
    staying in INT8; then they leave INT8 weights in the same order; then everything is as it was.
    """
    order = sorted(harm, key=lambda node: -harm[node] / next(x.parameters for x in layers if x.node == node))
    rung = dict(lowest)
    result = [dict(rung)]
    higher: tuple[Precision, ...] = ("int8-weight", "float16-weight")
    for precision in higher:
        for node in order:
            if rung[node] != precision:
                rung[node] = precision
                result.append(dict(rung))
    result.append({layer.node: "float32" for layer in layers})
    return result
