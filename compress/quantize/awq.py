"""AWQ: weights in 4 bits whose inputs with large activations are scaled up before rounding, and the activations down
(Lin et al., AWQ: Activation-aware Weight Quantization, 2023)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import ClassVar, Literal

import numpy as np
import onnx
from onnx import numpy_helper

from compress.quantize.calibration import draw_calibration_samples, single_sample_batches
from compress.quantize.graph_moments import collect_moments
from compress.quantize.plan_rounding import Group, RoundingConfig, round_plan
from compress.quantize.rounding import output_errors
from compress.quantize.sensitivity import make_ladder
from compress.quantize.tied_weights import find_tied_heads
from compress.quantize.weight_only import find_precisions, round_in_8_bits
from laconic.arrays import Array, Arrays
from laconic.data.dataset import Dataset
from laconic.hashing import environment_digest, hash_of
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, PrecisionLadder, Smoothing
from laconic.quantization.qparams import INT4_RANGE, expand_scales, fit_grid
from laconic.recipes.stage import PlanContext, PlanStage, Property
from laconic.runtimes.runtime import make_runtime

EXPONENTS = np.linspace(0, 1, 21)
"""Of the size of the activations, of which the best is taken; 0 leaves a weight as it is."""
LARGEST = 1 << 24
"""Numbers of a weight whose error is measured at once, about."""


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


def find_scales(
    matrices: Sequence[Array], gram: Array, config: RoundingConfig, shared: Array | None = None
) -> Array | None:
    """Find the scales of the inputs with which weights that share them have the least error together, relative to each
    layer's outputs; None where it is the least without. The paper takes the mean absolute activation for the size of a
    channel; here it is the root of the mean square, of which the second moments are the diagonal.

    matrices: [in, out] each. gram: the mean of x xT over the inputs x, [in, in]. shared: [in] int; inputs with the same
    number get one scale. By default each has its own.
    """
    squares = np.diagonal(gram)
    if shared is not None:
        squares = (np.bincount(shared, squares) / np.bincount(shared).clip(min=1))[shared]
    sizes = np.sqrt(squares).clip(min=1e-8)
    exact = [max(measure_outputs(matrix, gram), 1e-30) for matrix in matrices]

    def measure(factors: Array) -> float:
        pairs = zip(matrices, exact, strict=True)
        return sum(measure_error(matrix, factors, gram, config) / size for matrix, size in pairs)

    best, least = None, measure(np.ones(len(sizes), np.float32))
    for exponent in EXPONENTS[1:]:
        factors = sizes**exponent
        factors = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
        error = measure(factors)
        if error < least:
            best, least = factors, error
    return best


def measure_outputs(matrix: Array, gram: Array) -> float:
    """Measure the mean squared norm of a layer's outputs."""
    return sum(float((part * (gram @ part)).sum()) for part in split_outputs(matrix))


def measure_error(matrix: Array, factors: Array, gram: Array, config: RoundingConfig) -> float:
    """Measure the mean squared error of a layer's outputs with rounded weights. No weight is clipped here: that would
    take 13 times as long."""
    total = 0.0
    for part in split_outputs(matrix):
        scaled = part * factors[:, None]
        scales, zeros = fit_grid(scaled, config.group_size, INT4_RANGE, config.symmetric, clips=False)
        steps = expand_scales(scales, len(part), config.group_size)
        shifts = 0 if zeros is None else expand_scales(zeros, len(part), config.group_size)
        restored = (np.clip(np.rint(scaled / steps + shifts), *INT4_RANGE) - shifts) * steps / factors[:, None]
        total += float(output_errors(part, restored, gram).sum())
    return total


def split_outputs(matrix: Array) -> Iterator[Array]:
    """Yield a weight [in, out] as parts of some outputs, which bound what is in memory."""
    size = max(1, LARGEST // len(matrix))
    yield from (matrix[:, start : start + size] for start in range(0, matrix.shape[1], size))
