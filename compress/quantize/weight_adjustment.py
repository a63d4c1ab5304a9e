"""Round the weights of a plan by what flows into their layers, and put the mean error left over into their biases."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import onnx
from onnx import numpy_helper

from compress.quantize.calibrate import singles
from compress.quantize.graph_moments import Moments, Quantize, moments
from compress.quantize.product import Product
from compress.quantize.rounding import Levels, Rounding, rounded
from laconic.data.dataset import Dataset
from laconic.hashing import code_version, hash_of
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Precision, Range, Rounded, Smoothing
from laconic.quantization.qparams import FOUR_BITS, LARGEST, group_scales, quantize_weight, rounded_activation, spread
from laconic.recipes.stage import PlanContext
from laconic.runtimes.runtime import make_runtime
from laconic.tensor import Array, Arrays

WEIGHED: frozenset[Precision] = frozenset({"int4-weight", "int8", "int8-weight"})
"""The precisions whose integers are chosen here."""

Group = Literal[16, 32, 64, 128, 256]
"""Inputs that share a scale in 4 bits."""


@dataclass(frozen=True)
class Adjustment:
    """What is done to the weights of a plan.

    rounding: which way each weight goes. group: inputs that share a scale in 4 bits; None: all of them. order: whether
    GPTQ takes the inputs that matter most first. bias: put each layer's mean error into its bias (Nagel et al.,
    Data-Free Quantization Through Weight Equalization and Bias Correction, 2019; the empirical form).
    """

    rounding: Rounding = "nearest"
    group: int | None = None
    order: bool = True
    bias: bool = False


def adjusted(
    graph: Graph, plan: Plan, adjustment: Adjustment, datasets: Sequence[Dataset], context: PlanContext
) -> Plan:
    """The plan with weights for all layers that it quantizes, each for its precision there.

    Each layer is looked at alone, the float graph's tensors going in: so its weight fits any precision of the others.
    datasets: the samples to look with; none are touched where the nearest integers are wanted, and no biases.
    """
    layers = [layer for layer in graph.layers if plan.precision[layer.node] in WEIGHED]
    key = hash_of(
        "adjusted",
        graph.key,
        [dataset.fingerprint for dataset in datasets],
        [(layer.node, plan.precision[layer.node]) for layer in layers],
        sorted((name, limits.low, limits.high) for name, limits in plan.ranges.items()),
        sorted((name, each.factors.tolist()) for name, each in plan.smoothing.items()),
        asdict(adjustment),
        context.seed,
        code_version(),
    )

    def compute() -> Arrays:
        found: Arrays = {}
        with context.steps.step(f"round the weights ({adjustment.rounding})", len(layers)) as step:
            for layer, each in each_rounded(graph, layers, plan, adjustment, datasets, context):
                found |= {f"{name}:{layer.node}": array for name, array in each.arrays.items()}
                step.advance()
        return found

    arrays = context.cache.arrays(f"adjusted-{key}", compute)
    weights: dict[tuple[str, Precision], Rounded] = dict(plan.weights)
    for layer in layers:
        parts = {name: arrays.get(f"{name}:{layer.node}") for name in ("integers", "scales", "shift")}
        if parts["integers"] is not None and parts["scales"] is not None:
            group = adjustment.group if plan.precision[layer.node] == "int4-weight" else None
            weights[layer.node, plan.precision[layer.node]] = Rounded(
                parts["integers"], parts["scales"], parts["shift"], group
            )
    return replace(plan, weights=weights)


def each_rounded(
    graph: Graph,
    layers: Sequence[Layer],
    plan: Plan,
    adjustment: Adjustment,
    datasets: Sequence[Dataset],
    context: PlanContext,
) -> Iterator[tuple[Layer, Rounded]]:
    """The layers whose integers are chosen here, and their weights."""
    weights = {tensor.name: tensor for tensor in onnx.load(graph.path).graph.initializer}
    weighed = [layer for layer in layers if layer.kind in ("MatMul", "Conv")]
    second = adjustment.rounding != "nearest"
    seen: Iterable[tuple[Layer, Product, Moments]]
    if second or adjustment.bias:
        quantize = {layer.node: on_grid(layer, plan) for layer in weighed if plan.precision[layer.node] == "int8"}
        runtime, samples = make_runtime("onnxruntime"), partial(singles, datasets, context.task)
        seen = moments(graph, weighed, quantize, samples, runtime, context.folder, second=second, seed=context.seed)
    else:
        seen = ((layer, Product(), Moments.nothing(1, 0)) for layer in weighed if layer.kind == "MatMul")
    for layer, product, each in seen:
        precision = plan.precision[layer.node]
        smoothing = plan.smoothing.get(layer.input) if precision == "int8" else None
        weight = numpy_helper.to_array(weights[layer.weight])
        yield layer, layer_rounded(layer, product, weight, precision, each, smoothing, adjustment)


def on_grid(layer: Layer, plan: Plan) -> Quantize:
    """What the plan makes of a layer's input."""
    smoothing = plan.smoothing.get(layer.input)
    if smoothing is None:
        return partial(rounded_activation, limits=plan.ranges.get(layer.input, Range(0, 0)))
    return lambda rows: rounded_activation(rows / smoothing.factors, smoothing.limits) * smoothing.factors


def layer_rounded(
    layer: Layer,
    product: Product,
    weight: Array,
    precision: Precision,
    seen: Moments,
    smoothing: Smoothing | None,
    adjustment: Adjustment,
) -> Rounded:
    """A layer's weight on the grid of its precision. smoothing: of what it reads."""
    levels: Levels = FOUR_BITS if precision == "int4-weight" else (-LARGEST, LARGEST)
    group = adjustment.group if precision == "int4-weight" else None
    stretch = np.ones(1, np.float32) if smoothing is None else smoothing.factors
    matrices = product.matrix(weight) * stretch[:, None]
    integers, scales, shifts = [], [], []
    for index, matrix in enumerate(matrices):
        scale = group_scales(matrix, group) if precision == "int4-weight" else quantize_weight(matrix, 1)[1][None]
        steps = np.broadcast_to(spread(scale, len(matrix), group), matrix.shape)
        gram = seen.gram[index] / max(seen.count, 1) / np.outer(stretch, stretch)
        integers.append(rounded(matrix, steps, gram, levels, adjustment.rounding, order=adjustment.order))
        scales.append(scale)
        if adjustment.bias:
            kept, given = seen.total[index] @ (matrix / stretch[:, None]), seen.quantized[index]
            shifts.append((kept - given @ (integers[-1] * steps / stretch[:, None])) / max(seen.count, 1))
    return Rounded(
        product.weight(np.stack(integers), layer.shape),
        np.concatenate(scales, axis=1),
        np.concatenate(shifts).astype(np.float32) if shifts else None,
        group,
    )
