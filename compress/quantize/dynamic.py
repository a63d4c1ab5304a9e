"""INT8 weights and activations, each input's range taken as it comes: no calibration."""

from typing import ClassVar

from compress.quantize.quantized_layers import chosen
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Ladder, Plan, Precision
from laconic.recipes.stage import PlanContext, PlanStage, Property


class Dynamic(PlanStage):
    """INT8 weights and activations, ranges taken from each input.

    One range a tensor and run: in a batch, the neighbours of a sample change its answer. Where answers are batched,
    prefer quantize.static. keep: layers, by name or pattern, that stay in float.
    """

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})

    keep: tuple[str, ...] = ()

    def plan(self, graph: Graph, context: PlanContext) -> Ladder:
        kept = chosen(graph.layers, self.keep)
        precision: dict[str, Precision] = {}
        for layer in graph.layers:
            dynamic: Precision = "int8-dynamic" if layer.kind in {"MatMul", "Gemm"} else "int8-weight"
            precision[layer.node] = "float32" if layer.node in kept else dynamic
        return Ladder.of(Plan(precision))
