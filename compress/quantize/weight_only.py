"""Weight-only quantization: arithmetic in float, and no calibration unless the rounding method needs it."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from compress.quantize.calibration import draw_calibration_samples
from compress.quantize.plan_rounding import Group, RoundingConfig, round_plan
from compress.quantize.rounding import Rounding
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
    """The precision of a layer's weight for a number of bits, as far as the engines can read it."""
    if bits == 16:
        return "float16-weight"
    return "int4-weight" if bits == 4 and layer.kind == "MatMul" else "int8-weight"
