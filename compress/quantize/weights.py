"""Weights in fewer bits, arithmetic in float: no calibration, and little harm."""

from typing import Literal

from compress.quantize.layers import chosen
from laconic.graph import Graph
from laconic.plan import Ladder, Plan, Precision
from laconic.stage import PlanContext, PlanStage


class Weights(PlanStage):
    """Weights in fewer bits, arithmetic in the engine's float.

    bits: 8 (one scale per output channel) or 16. keep: layers, by name or pattern, that stay in float32.
    """

    bits: Literal[8, 16] = 8
    keep: tuple[str, ...] = ()

    def plan(self, graph: Graph, context: PlanContext) -> Ladder:
        kept = chosen(graph.layers, self.keep)
        precision: Precision = "int8-weight" if self.bits == 8 else "float16-weight"
        return Ladder.of(Plan({x.node: "float32" if x.node in kept else precision for x in graph.layers}))
