"""Dynamic quantization: INT8 weights and activations, with ranges from each input at run time; no calibration."""

from typing import ClassVar

from laconic.models.layer_patterns import match_layers
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, Precision, PrecisionLadder
from laconic.recipes.stage import PlanContext, PlanStage, Property


class Dynamic(PlanStage):
    """INT8 weights and activations, ranges taken from each input.

    There is one range per tensor and run: in a batch, the other samples change a sample's output. Prefer
    quantize.static where requests are batched. keep: layers, by name or pattern, that stay in float.
    """

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})

    keep: tuple[str, ...] = ()

    def plan(self, graph: Graph, context: PlanContext) -> PrecisionLadder:
        kept = match_layers(graph.layers, self.keep)
        precision: dict[str, Precision] = {}
        for layer in graph.layers:
            dynamic: Precision = "int8-dynamic" if layer.kind in {"MatMul", "Gemm", "LSTM"} else "int8-weight"
            precision[layer.node] = "float32" if layer.node in kept else dynamic
        return PrecisionLadder.of(Plan(precision))
