"""Sensitivity analysis: how much quantizing each layer costs, and the precision ladder that follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import overload

from compress.quantize.tied_weights import find_tied_heads
from export.placements.place import has_attention
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, Precision, PrecisionLadder
from laconic.recipes.stage import PlanContext


def measure_sensitivity(graph: Graph, lowest: Plan, context: PlanContext) -> dict[str, float]:
    """Return the sensitivity of each layer: the mean divergence when it alone is quantized, by node.

    lowest: each layer's lowest precision. The cost is one trial per layer.
    """
    candidates = [layer for layer in graph.layers if lowest.precision[layer.node] != "float32"]
    floats: dict[str, Precision] = {layer.node: "float32" for layer in graph.layers}
    sensitivity: dict[str, float] = {}
    with context.steps.step("measure each layer's sensitivity", len(candidates)) as step:
        for layer in candidates:
            alone = replace(lowest, precision=floats | {layer.node: lowest.precision[layer.node]})
            sensitivity[layer.node] = float(context.trial(alone).mean())
            step.advance()
        if sensitivity:
            worst = max(candidates, key=lambda layer: sensitivity[layer.node])
            step.note = f"worst: {worst.module}, {sensitivity[worst.node]:.2g}"
    return sensitivity


@dataclass
class LayerOrder:
    """The layers that leave INT8, the most sensitive per weight first. They are measured when a plan between the first
    and the last of a rung is asked for, which most models never need: with AVX2 alone it takes 38 of the 170 seconds
    of MiniLM.

    lowest: each layer's lowest precision. sensitivity: by node; empty until it is measured.
    """

    graph: Graph
    lowest: Plan
    context: PlanContext
    sensitivity: dict[str, float] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> list[str]:
        """The layers in order, by node; those of embeddings, which cost no time, are left out."""
        self.sensitivity |= measure_sensitivity(self.graph, self.lowest, self.context)
        parameters = {layer.node: layer.parameters for layer in self.graph.layers}
        return sorted(self.members, key=lambda node: -self.sensitivity[node] / parameters[node])

    @cached_property
    def members(self) -> list[str]:
        """The same layers in the order of the graph."""
        layers = (layer for layer in self.graph.layers if layer.kind != "Gather")
        return [layer.node for layer in layers if self.lowest.precision[layer.node] != "float32"]

    @property
    def tables(self) -> list[str]:
        """The embeddings, by node."""
        layers = (layer for layer in self.graph.layers if layer.kind == "Gather")
        return [layer.node for layer in layers if self.lowest.precision[layer.node] != "float32"]

    @cached_property
    def tied(self) -> dict[str, str]:
        """The embeddings in 4 bits by their heads, with which they are raised: the weight is stored once."""
        if "int4-weight" not in {self.lowest.precision[node] for node in self.tables}:
            return {}
        return {head: table.node for head, table in find_tied_heads(self.graph).items()}


class Rung(Sequence[Plan]):
    """Plans that raise the layers to a precision one after the other, the most sensitive first."""

    def __init__(self, lowest: Plan, order: LayerOrder, precision: Precision) -> None:
        self._lowest, self._order, self._precision = lowest, order, precision

    def __len__(self) -> int:
        return len(self._order.members) + 1

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | Sequence[Plan]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        count = range(len(self))[index]
        # The first and the last plan are the same in every order.
        raised = self._order.members if count in (0, len(self) - 1) else self._order.nodes
        nodes = [*raised[:count], *(self._order.tied[node] for node in raised[:count] if node in self._order.tied)]
        changed: Mapping[str, Precision] = dict.fromkeys(nodes, self._precision)
        return replace(self._lowest, precision={**self._lowest.precision, **changed})


def make_ladder(graph: Graph, lowest: Plan, context: PlanContext, *, measure: bool = False) -> PrecisionLadder:
    """Return the rungs of the precision ladder.

    The first is the lowest plan alone, where an engine may run attention in INT8 in it: attention leaves INT8 before
    any layer does, since it costs most and saves least (the shape of ViT-B, OpenVINO in FP32, AVX2: fidelity 0.964
    with it, 0.977 without). On the next, layers leave INT8 arithmetic one after the other, the most sensitive per
    weight first, while all weights stay in INT8. On the one after, their weights go to 16 bits as they leave; those of
    the embeddings, which cost no time, have 16 bits from the start, with the heads that are embeddings in 4 bits. The
    last is the float graph. measure: measure the sensitivity even if no plan needs it.
    """
    whole = [(lowest,)] if "int8" in lowest.precision.values() and has_attention(graph) else []
    lowest = replace(lowest, attention=not whole)
    order = LayerOrder(graph, lowest, context)
    heads = [node for node in order.members if node in order.tied]
    wide: dict[str, Precision] = dict.fromkeys((*order.tables, *heads), "float16-weight")
    floats: dict[str, Precision] = {layer.node: "float32" for layer in graph.layers}
    rungs = (
        *whole,
        Rung(lowest, order, "int8-weight"),
        Rung(replace(lowest, precision={**lowest.precision, **wide}), order, "float16-weight"),
        (replace(lowest, precision=floats),),
    )
    if measure:
        _ = order.nodes
    return PrecisionLadder(rungs, order.sensitivity)
