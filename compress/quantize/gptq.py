"""Weights in 4 or 8 bits, rounded so that the layers' answers on calibration data stay; arithmetic in float."""

from typing import ClassVar, Literal

from compress.quantize.calibrate import drawn
from compress.quantize.quantized_layers import chosen
from compress.quantize.sensitivity import flights, harms
from compress.quantize.weight_adjustment import Adjustment, Group, adjusted
from compress.quantize.weight_only import precision
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Ladder, Plan
from laconic.recipes.stage import PlanContext, PlanStage, Property


class Gptq(PlanStage):
    """Weights in fewer bits, each error made up for by the weights that are rounded after it; arithmetic in float.

    bits: 4 (a scale for each group of inputs and each output; convolutions and embeddings keep 8) or 8 (a scale for
    each output). group: inputs that share a scale, at 4 bits. order: take the inputs that matter most first.
    bias_correction: put the mean error of each layer into its bias. samples: how many to calibrate with. keep: layers,
    by name or pattern, that stay in float. mixed: measure each layer's harm once, and lift the worst ones to more bits
    until the goal is met.
    """

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})

    bits: Literal[4, 8] = 4
    group: Group = 32
    order: bool = True
    bias_correction: bool = False
    samples: int = 256
    keep: tuple[str, ...] = ()
    mixed: bool = True

    def plan(self, graph: Graph, context: PlanContext) -> Ladder:
        kept = chosen(graph.layers, self.keep)
        plan = Plan({x.node: "float32" if x.node in kept else precision(x, self.bits) for x in graph.layers})
        adjustment = Adjustment("gptq", self.group, self.order, self.bias_correction)
        plan = adjusted(graph, plan, adjustment, drawn(context, self.samples), context)
        if not self.mixed:
            return Ladder.of(plan)
        harm = harms(graph, plan, context)
        return Ladder(flights(graph.layers, plan, harm), harm)
