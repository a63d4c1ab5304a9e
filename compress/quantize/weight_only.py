"""Weight-only quantization: arithmetic in float; GPTQ rounds so that the layers' outputs on calibration data stay."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from compress.quantize.calibration import draw_calibration_samples
from compress.quantize.plan_rounding import Group, RoundingConfig, round_plan
from compress.quantize.rounding import Rounding
from compress.quantize.sensitivity import make_ladder
from laconic.models.layer_patterns import match_layers
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Precision, PrecisionLadder
from laconic.recipes.stage import PlanContext, PlanStage, Property


class Weights(PlanStage):
    """Weights in fewer bits, arithmetic in the engine's float.

    bits: 4 (group-wise scales), 8 (per-channel scales) or 16 (FP16). At 4 bits convolutions and embeddings keep 8.
    group_size: inputs that share a scale, at 4 bits. rounding: the rounding method; nearest needs no samples. samples:
    number of calibration samples. keep: layers, by name or pattern, that stay in float32.
    """

    renamed: ClassVar[Mapping[str, str]] = {"group": "group_size"}

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})

    bits: Literal[4, 8, 16] = 8
    group_size: Group = 32
    rounding: Rounding = "nearest"
    samples: int = 256
    keep: tuple[str, ...] = ()

    def plan(self, graph: Graph, context: PlanContext) -> PrecisionLadder:
        kept = match_layers(graph.layers, self.keep)
        plan = Plan({x.node: "float32" if x.node in kept else weight_precision(x, self.bits) for x in graph.layers})
        if self.bits == 16 or (self.bits == 8 and self.rounding == "nearest"):
            return PrecisionLadder.of(plan)
        config = RoundingConfig(self.rounding, self.group_size)
        datasets = [] if self.rounding == "nearest" else draw_calibration_samples(context, self.samples)
        return PrecisionLadder.of(round_plan(graph, plan, config, datasets, context))


def weight_precision(layer: Layer, bits: int) -> Precision:
    """Return the precision of a layer's weight for a number of bits, as far as the engines can read it."""
    if bits == 16:
        return "float16-weight"
    return "int4-weight" if bits == 4 and layer.kind == "MatMul" else "int8-weight"


class Gptq(PlanStage):
    """Weights in 4 or 8 bits by GPTQ: later weights compensate each rounding error; arithmetic in float.

    bits: 4 (group-wise scales; convolutions and embeddings keep 8 bits) or 8 (per-channel scales). group_size: inputs
    that share a scale, at 4 bits. act_order: round the inputs with the largest activations first. bias_correction: add
    the mean error of each layer to its bias. samples: number of calibration samples. keep: layers, by name or pattern,
    that stay in float. mixed_precision: where the goal is missed, measure the sensitivity of each layer once, and keep
    the most sensitive ones in higher precision until the goal is met. measure_sensitivity: also where the goal is met,
    for the report.
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "group": "group_size",
        "order": "act_order",
        "mixed": "mixed_precision",
    }

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})

    bits: Literal[4, 8] = 4
    group_size: Group = 32
    act_order: bool = True
    bias_correction: bool = False
    samples: int = 256
    keep: tuple[str, ...] = ()
    mixed_precision: bool = True
    measure_sensitivity: bool = False

    def plan(self, graph: Graph, context: PlanContext) -> PrecisionLadder:
        kept = match_layers(graph.layers, self.keep)
        plan = Plan({x.node: "float32" if x.node in kept else weight_precision(x, self.bits) for x in graph.layers})
        config = RoundingConfig("gptq", self.group_size, self.act_order, self.bias_correction)
        plan = round_plan(graph, plan, config, draw_calibration_samples(context, self.samples), context)
        if not self.mixed_precision:
            return PrecisionLadder.of(plan)
        return make_ladder(graph, plan, context, measure=self.measure_sensitivity)
