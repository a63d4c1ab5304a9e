"""Weights in fewer bits, arithmetic in float: no calibration unless the rounding asks for it, and little harm."""

from typing import ClassVar, Literal

from compress.quantize.calibrate import drawn
from compress.quantize.quantized_layers import chosen
from compress.quantize.rounding import Rounding
from compress.quantize.weight_adjustment import Adjustment, Group, adjusted
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Ladder, Plan, Precision
from laconic.recipes.stage import PlanContext, PlanStage, Property


class Weights(PlanStage):
    """Weights in fewer bits, arithmetic in the engine's float.

    bits: 4 (a scale for each group of inputs and each output), 8 (one for each output) or 16. At 4 bits convolutions
    and embeddings keep 8. group: inputs that share a scale, at 4 bits. rounding: which way each weight goes; the
    nearest needs no samples. samples: how many to calibrate with. keep: layers, by name or pattern, that stay in
    float32.
    """

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})

    bits: Literal[4, 8, 16] = 8
    group: Group = 32
    rounding: Rounding = "nearest"
    samples: int = 256
    keep: tuple[str, ...] = ()

    def plan(self, graph: Graph, context: PlanContext) -> Ladder:
        kept = chosen(graph.layers, self.keep)
        plan = Plan({x.node: "float32" if x.node in kept else precision(x, self.bits) for x in graph.layers})
        if self.bits == 16 or (self.bits == 8 and self.rounding == "nearest"):
            return Ladder.of(plan)
        adjustment = Adjustment(self.rounding, self.group)
        datasets = [] if self.rounding == "nearest" else drawn(context, self.samples)
        return Ladder.of(adjusted(graph, plan, adjustment, datasets, context))


def precision(layer: Layer, bits: int) -> Precision:
    """What a layer's weight is kept in, where its bits are given: those that every engine reads."""
    if bits == 16:
        return "float16-weight"
    return "int4-weight" if bits == 4 and layer.kind == "MatMul" else "int8-weight"
