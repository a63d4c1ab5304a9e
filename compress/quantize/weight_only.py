"""Weight-only quantization: arithmetic in float; GPTQ rounds so that the layers' outputs on calibration data stay."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from compress.quantize.calibration import draw_calibration_samples
from compress.quantize.plan_rounding import Group, RoundingConfig, round_plan
from compress.quantize.rounding import Rounding
from compress.quantize.sensitivity import make_ladder
from compress.quantize.tied_weights import find_tied_heads
from laconic.models.layer_patterns import match_layers
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, Precision, PrecisionLadder
from laconic.quantization.qparams import DEFAULT_GROUP_SIZE
from laconic.recipes.stage import PlanContext, PlanStage, Property


class Weights(PlanStage):
    """Weights in fewer bits, arithmetic in the engine's float.

    bits: 4, 8 or 16 (FP16). At 4 bits convolutions keep 8. embedding_bits: at 4 bits, those of embeddings, and of a
    head with the weight of an embedding. group_size: inputs that share a scale; by default 32 at 4 bits, and all at 8
    bits. symmetric: whether groups in 4 bits have no zeros. rounding: the rounding method; nearest needs no samples.
    samples: number of calibration samples. keep: layers, by name or pattern, that stay in float32. keep_int8: those
    that have 8 bits where others have 4, as a tower of images beside a language model. mixed_precision: where the goal
    is missed, measure the sensitivity of each layer once, and give the most sensitive ones more bits until the goal is
    met.
    """

    renamed: ClassVar[Mapping[str, str]] = {"group": "group_size"}

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    rounds_layers: ClassVar[bool] = True

    bits: Literal[4, 8, 16] = 8
    embedding_bits: Literal[4, 8] = 8
    group_size: Group | None = None
    symmetric: bool = True
    rounding: Rounding = "nearest"
    samples: int = 256
    keep: tuple[str, ...] = ()
    keep_int8: tuple[str, ...] = ()
    mixed_precision: bool = False

    def plan(self, graph: Graph, context: PlanContext) -> PrecisionLadder:
        plan = Plan(find_precisions(graph, self.bits, self.keep, self.embedding_bits, self.keep_int8))
        if not (self.bits == 16 or (self.bits == 8 and self.rounding == "nearest" and self.group_size is None)):
            datasets = [] if self.rounding == "nearest" else draw_calibration_samples(context, self.samples)
            plan = round_plan(graph, plan, make_config(self, self.rounding), datasets, context)
        if not self.mixed_precision:
            return PrecisionLadder.of(plan)
        return make_ladder(graph, round_in_8_bits(graph, plan, self.group_size, context), context)


def find_precisions(
    graph: Graph, bits: int, keep: tuple[str, ...], embedding_bits: int = 8, keep_int8: tuple[str, ...] = ()
) -> dict[str, Precision]:
    """Return the precision of each layer's weight for a number of bits, as far as the engines can read it. keep:
    layers, by name or pattern, that stay in float. embedding_bits: at 4 bits, those of embeddings. keep_int8: layers
    that have 8 bits then."""
    kept, larger = match_layers(graph.layers, keep), match_layers(graph.layers, keep_int8)
    small = {"MatMul", "Gather"} if embedding_bits == 4 else {"MatMul"}
    # One weight in 8 bits is smaller than it in 8 and in 4.
    heads = find_tied_heads(graph) if bits == 4 and "Gather" not in small else {}
    precisions: dict[str, Precision] = {}
    for layer in graph.layers:
        if layer.node in kept:
            precisions[layer.node] = "float32"
        elif bits == 16:
            precisions[layer.node] = "float16-weight"
        else:
            is_small = bits == 4 and layer.kind in small and layer.node not in heads and layer.node not in larger
            precisions[layer.node] = "int4-weight" if is_small else "int8-weight"
    return precisions


def round_in_8_bits(graph: Graph, plan: Plan, group_size: Group | None, context: PlanContext) -> Plan:
    """Return a plan with weights in 8 bits too of the layers that have 4, for those that are raised: to nearest, in the
    same groups. group_size: None leaves them a scale for each output."""
    raised: dict[str, Precision] = {
        node: "int8-weight" if precision == "int4-weight" else "float32" for node, precision in plan.precision.items()
    }
    if group_size is None or "int8-weight" not in raised.values():
        return plan
    rounded = round_plan(graph, Plan(raised), RoundingConfig("nearest", int8_group_size=group_size), [], context)
    return replace(plan, weights={**rounded.weights, **plan.weights})


def make_config(stage: "Weights | Gptq", rounding: Rounding) -> RoundingConfig:
    """Return how a stage rounds weights."""
    return RoundingConfig(
        rounding,
        group_size=stage.group_size or DEFAULT_GROUP_SIZE,
        int8_group_size=stage.group_size,
        symmetric=stage.symmetric,
    )


class Gptq(PlanStage):
    """Weights in 4 or 8 bits by GPTQ: later weights compensate each rounding error; arithmetic in float.

    bits: 4 (convolutions keep 8) or 8. embedding_bits: at 4 bits, those of embeddings, and of a head with the weight of
    an embedding, which are rounded to nearest. group_size: inputs that share a scale; by default 32 at 4 bits, and all
    at 8 bits. symmetric: whether groups in 4 bits have no zeros. act_order: round the inputs with the largest
    activations first. bias_correction: add the mean error of each layer to its bias. samples: number of calibration
    samples. keep: layers, by name or pattern, that stay in float. keep_int8: those that have 8 bits where others have
    4, as a tower of images beside a language model. mixed_precision: where the goal is missed, measure the sensitivity
    of each layer once, and keep the most sensitive ones in higher precision until the goal is met. measure_sensitivity:
    also where the goal is met, for the report.
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "group": "group_size",
        "order": "act_order",
        "mixed": "mixed_precision",
    }

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    rounds_layers: ClassVar[bool] = True

    bits: Literal[4, 8] = 4
    embedding_bits: Literal[4, 8] = 8
    group_size: Group | None = None
    symmetric: bool = True
    act_order: bool = True
    bias_correction: bool = False
    samples: int = 256
    keep: tuple[str, ...] = ()
    keep_int8: tuple[str, ...] = ()
    mixed_precision: bool = True
    measure_sensitivity: bool = False

    def plan(self, graph: Graph, context: PlanContext) -> PrecisionLadder:
        plan = Plan(find_precisions(graph, self.bits, self.keep, self.embedding_bits, self.keep_int8))
        config = replace(make_config(self, "gptq"), act_order=self.act_order, bias_correction=self.bias_correction)
        plan = round_plan(graph, plan, config, draw_calibration_samples(context, self.samples), context)
        if not self.mixed_precision:
            return PrecisionLadder.of(plan)
        plan = round_in_8_bits(graph, plan, self.group_size, context)
        return make_ladder(graph, plan, context, measure=self.measure_sensitivity)
