"""AWQ: weights in 4 bits whose inputs with large activations are scaled up before rounding, and the activations down
(Lin et al., AWQ: Activation-aware Weight Quantization, 2023)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import ClassVar, Literal

import onnx
from onnx import numpy_helper

from compress.quantize.awq_scales import find_scales
from compress.quantize.calibration import draw_calibration_samples, single_sample_batches
from compress.quantize.graph_moments import collect_moments
from compress.quantize.plan_rounding import Group, RoundingConfig, round_plan
from compress.quantize.sensitivity import make_ladder
from compress.quantize.tied_weights import find_tied_heads
from compress.quantize.weight_only import find_precisions, round_in_8_bits
from laconic.arrays import Array, Arrays
from laconic.data.dataset import Dataset
from laconic.hashing import environment_digest, hash_of
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, PrecisionLadder, Smoothing
from laconic.recipes.stage import PlanContext, PlanStage, Property
from laconic.runtimes.runtime import make_runtime


class Awq(PlanStage):
    """Weights in 4 bits by AWQ: inputs with large activations are scaled up before rounding; arithmetic in float.

    embedding_bits: those of embeddings, and of a head with the weight of an embedding, which are rounded to nearest.
    group_size: inputs that share a scale. symmetric: whether groups have no zeros. samples: number of calibration
    samples. keep: layers, by name or pattern, that stay in float. mixed_precision: where the goal is missed, measure
    the sensitivity of each layer once, and keep the most sensitive ones in higher precision until the goal is met.
    measure_sensitivity: also where the goal is met, for the report.
    """

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    rounds_layers: ClassVar[bool] = True

    embedding_bits: Literal[4, 8] = 8
    group_size: Group = 32
    symmetric: bool = True
    samples: int = 256
    keep: tuple[str, ...] = ()
    mixed_precision: bool = True
    measure_sensitivity: bool = False

    def plan(self, graph: Graph, context: PlanContext) -> PrecisionLadder:
        config = RoundingConfig(group_size=self.group_size, int8_group_size=self.group_size, symmetric=self.symmetric)
        plan = Plan(find_precisions(graph, 4, self.keep, self.embedding_bits))
        datasets = draw_calibration_samples(context, self.samples)
        plan = replace(plan, smoothing=find_awq_scales(graph, plan, config, datasets, context))
        plan = round_plan(graph, plan, config, datasets, context)
        if not self.mixed_precision:
            return PrecisionLadder.of(plan)
        plan = round_in_8_bits(graph, plan, self.group_size, context)
        return make_ladder(graph, plan, context, measure=self.measure_sensitivity)


def find_awq_scales(
    graph: Graph, plan: Plan, config: RoundingConfig, datasets: Sequence[Dataset], context: PlanContext
) -> Mapping[str, Smoothing]:
    """Find the scales of the inputs of layers in 4 bits, by tensor; none where nothing is better than rounding. Layers
    that read the same tensor share them."""
    heads = find_tied_heads(graph)  # the embedding has the weight as it is
    linear = [layer for layer in graph.layers if layer.kind == "MatMul"]
    fixed = {layer.input for layer in linear if layer.node in heads}
    layers = [layer for layer in linear if plan.precision[layer.node] == "int4-weight" and layer.input not in fixed]
    key = hash_of(
        "awq", graph.key, [dataset.fingerprint for dataset in datasets], [layer.node for layer in layers],
        config.group_size, config.symmetric, environment_digest(),
    )  # fmt: skip

    def compute() -> Arrays:
        with context.steps.step("scale the weights (AWQ)", len(layers)) as step:
            factors: Arrays = {}
            for tensor, best, count in search_scales(graph, layers, config, datasets, context):
                factors |= {} if best is None else {tensor: best}
                step.advance(count)
        return factors

    return {name: Smoothing(factors) for name, factors in context.cache.arrays(f"awq-{key}", compute).items()}


def search_scales(
    graph: Graph, layers: Sequence[Layer], config: RoundingConfig, datasets: Sequence[Dataset], context: PlanContext
) -> Iterator[tuple[str, Array | None, int]]:
    """Yield each tensor that the layers read, its scales [channels], None where rounding alone is best, and the number
    of layers that read it."""
    weights = {tensor.name: tensor for tensor in onnx.load(graph.path).graph.initializer}
    observed = collect_moments(
        graph, layers, {}, partial(single_sample_batches, datasets, context.task), make_runtime("onnxruntime"),
        context.folder, second=True, seed=context.seed,
    )  # fmt: skip
    for tensor, group in groupby(observed, key=lambda each: each[0].input):
        readers = list(group)
        matrices = [numpy_helper.to_array(weights[layer.weight]) for layer, _, _ in readers]
        yield tensor, find_scales(matrices, readers[0][2].second[0], config), len(readers)
