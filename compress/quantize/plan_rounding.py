"""Round the weights of a plan by the moments of the layers' inputs, with bias correction."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from compress.quantize.calibration import single_sample_batches
from compress.quantize.graph_moments import ActivationQuantizer, GraphMoments, collect_moments
from compress.quantize.im2col import Im2Col
from compress.quantize.rounding import Rounding, reduced_range_scales, round_weight
from compress.quantize.tied_weights import find_tied_heads
from laconic.arrays import Array, Arrays
from laconic.data.dataset import Dataset
from laconic.hashing import environment_digest, hash_of
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Precision, QuantizedWeight, Range, Smoothing
from laconic.quantization.plan_file import digest_plan
from laconic.quantization.qparams import (
    INT4_RANGE,
    INT8_LEVELS,
    Levels,
    expand_scales,
    fake_quantize_activation,
    find_grid_size,
    fit_grid,
    is_on_grid,
    quantize_in_groups,
    quantize_weight,
)
from laconic.recipes.stage import PlanContext
from laconic.runtimes.runtime import make_runtime

ROUNDED_PRECISIONS: frozenset[Precision] = frozenset({"int4-weight", "int8", "int8-weight"})
"""Precisions with integer weights that are rounded here."""

PARTS = ("integers", "scales", "bias_correction", "zeros", "group_size")
"""The parts of a quantized weight, as arrays; a group_size of 0 stands for all inputs."""

Group = Literal[16, 32, 64, 128, 256]
"""Sizes of a group of inputs that share a scale."""


@dataclass(frozen=True)
class RoundingConfig:
    """How the weights of a plan are rounded.

    rounding: the method. group_size: inputs that share a scale in 4 bits, and int8_group_size in 8 bits of weight-only
    quantization; None: all of them. symmetric: whether the groups in 4 bits have no zeros. act_order: of GPTQ, round
    the inputs with the largest activations first. bias_correction: add each layer's mean error to its bias (Nagel et
    al., Data-Free Quantization Through Weight Equalization and Bias Correction, 2019; the empirical form).
    reduce_range: weights of INT8 arithmetic get scales with which kernels that add pairs of products in 16 bits cannot
    saturate.
    """

    rounding: Rounding = "nearest"
    group_size: int | None = None
    int8_group_size: int | None = None
    symmetric: bool = True
    act_order: bool = True
    bias_correction: bool = False
    reduce_range: bool = False

    @property
    def needs_inputs(self) -> bool:
        """Whether the inputs of layers decide anything."""
        return self.rounding != "nearest" or self.bias_correction or self.reduce_range

    def find_group_size(self, precision: Precision) -> int | None:
        """Return the number of inputs that share a scale in a precision; None: all of them."""
        return {"int4-weight": self.group_size, "int8-weight": self.int8_group_size}.get(precision)

    def is_symmetric(self, precision: Precision) -> bool:
        """Return whether groups have no zeros in a precision."""
        return self.symmetric or precision != "int4-weight"

    def find_levels(self, precision: Precision) -> Levels:
        """Return the lowest and the highest integer in a precision."""
        return INT4_RANGE if precision == "int4-weight" else INT8_LEVELS


def round_plan(
    graph: Graph, plan: Plan, config: RoundingConfig, datasets: Sequence[Dataset], context: PlanContext
) -> Plan:
    """Return the plan with rounded weights for all layers that it quantizes, each for its precision in the plan.

    Each layer is rounded by itself, with the float graph's tensors as inputs, so its weight fits any precision of the
    other layers. datasets: calibration samples; not used for rounding to nearest without bias correction.
    """
    (rounded,) = round_plans(graph, plan, [config], datasets, context)
    return rounded


def round_plans(
    graph: Graph, plan: Plan, configs: Sequence[RoundingConfig], datasets: Sequence[Dataset], context: PlanContext
) -> list[Plan]:
    """Return the plan as by `round_plan` for each config, from one run of the samples. configs: with the same
    method."""
    layers = [layer for layer in graph.layers if plan.precision[layer.node] in ROUNDED_PRECISIONS]
    key = hash_of(
        "adjusted",
        graph.key,
        [dataset.fingerprint for dataset in datasets],
        digest_plan(plan),
        [asdict(config) for config in configs],
        context.seed,
        environment_digest(),
    )

    def compute() -> Arrays:
        arrays: Arrays = {}
        with context.steps.step(f"round the weights ({configs[0].rounding})", len(layers)) as step:
            for layer, rounded in round_layers(graph, layers, plan, configs, datasets, context):
                for number, weight in enumerate(rounded):
                    parts = weight.arrays | {"group_size": np.array(weight.group_size or 0)}
                    arrays |= {f"{number}:{name}:{layer.node}": array for name, array in parts.items()}
                step.advance()
        return arrays

    arrays = context.cache.arrays(f"adjusted-{key}", compute)
    return [
        restore_weights(plan, layers, {name: arrays.get(f"{number}:{name}") for name in list_names(layers)})
        for number in range(len(configs))
    ]


def list_names(layers: Sequence[Layer]) -> list[str]:
    """Return the names of the arrays that rounding some layers may give."""
    return [f"{part}:{layer.node}" for layer in layers for part in PARTS]


def restore_weights(plan: Plan, layers: Sequence[Layer], arrays: Mapping[str, Array | None]) -> Plan:
    """Return the plan with the weights of some layers. arrays: of `list_names`, None where rounding gave none."""
    weights: dict[tuple[str, Precision], QuantizedWeight] = dict(plan.weights)
    for layer in layers:
        integers, scales, bias_correction, zeros, group_size = (arrays[f"{part}:{layer.node}"] for part in PARTS)
        if integers is not None and scales is not None and group_size is not None:
            size = int(group_size) or None
            weight = QuantizedWeight(integers, scales, bias_correction, size, zeros)
            weights[layer.node, plan.precision[layer.node]] = weight
    return replace(plan, weights=weights)


def round_layers(
    graph: Graph,
    layers: Sequence[Layer],
    plan: Plan,
    configs: Sequence[RoundingConfig],
    datasets: Sequence[Dataset],
    context: PlanContext,
) -> Iterator[tuple[Layer, list[QuantizedWeight]]]:
    """Yield each layer that is rounded here, with its quantized weight by each config."""
    weights = {tensor.name: tensor for tensor in onnx.load(graph.path).graph.initializer}
    shared: dict[tuple[str, Precision], list[QuantizedWeight]] = {}
    heads = find_tied_heads(graph, weights)
    for layer in layers:
        precision = plan.precision[layer.node]
        if layer.kind == "Gather" and any(config.find_group_size(precision) for config in configs):
            table = numpy_helper.to_array(weights[layer.weight])
            rounded = [round_table(table, precision, config) for config in configs]
            yield layer, rounded
            for head in graph.layers:
                if heads.get(head.node) == layer:
                    shared[head.weight, precision] = [transpose_weight(weight) for weight in rounded]
    products = [layer for layer in layers if layer.kind in ("MatMul", "Conv")]
    if any(config.needs_inputs for config in configs):
        exact = [layer for layer in products if is_kept_exactly(layer, weights, plan, configs, shared)]
        products = [layer for layer in products if layer not in exact]
    else:
        exact, products = [layer for layer in products if layer.kind == "MatMul"], []
    unobserved = ((layer, Im2Col(), GraphMoments.zeros(1, 0)) for layer in exact)
    observed = observe_inputs(graph, products, plan, configs, datasets, context) if products else ()
    for layer, im2col, each in chain(unobserved, observed):
        precision = plan.precision[layer.node]
        smoothing = plan.smoothing.get(layer.input) if precision in ("int8", "int4-weight") else None
        weight = numpy_helper.to_array(weights[layer.weight])
        firsts = shared.get((layer.weight, precision), [None] * len(configs))
        rounded = [
            round_layer(layer, im2col, weight, precision, each, smoothing, config, first)
            for config, first in zip(configs, firsts, strict=True)
        ]
        shared.setdefault((layer.weight, precision), rounded)
        yield layer, rounded


def is_kept_exactly(
    layer: Layer,
    weights: Mapping[str, TensorProto],
    plan: Plan,
    configs: Sequence[RoundingConfig],
    shared: Container[tuple[str, Precision]],
) -> bool:
    """Return whether a linear layer's weight lies on a grid, which rounding to nearest keeps, or is one that is rounded
    already: `shared`, by weight and precision. The layer's inputs are of no use then."""
    precision = plan.precision[layer.node]
    if layer.kind != "MatMul" or any(config.bias_correction for config in configs):
        return False
    if (layer.weight, precision) in shared:
        return True
    if layer.input in plan.smoothing or any(config.is_symmetric(precision) for config in configs):
        return False
    weight = numpy_helper.to_array(weights[layer.weight])
    return all(is_on_grid(weight, config.find_group_size(precision)) for config in configs)


def observe_inputs(
    graph: Graph,
    layers: Sequence[Layer],
    plan: Plan,
    configs: Sequence[RoundingConfig],
    datasets: Sequence[Dataset],
    context: PlanContext,
) -> Iterator[tuple[Layer, Im2Col, GraphMoments]]:
    """Yield layers with the moments of their inputs over the samples."""
    second = any(config.rounding != "nearest" for config in configs)
    int8 = [layer for layer in layers if plan.precision[layer.node] == "int8"]
    quantize = {layer.node: make_quantizer(layer, plan) for layer in int8}
    runtime, samples = make_runtime("onnxruntime"), partial(single_sample_batches, datasets, context.task)
    return collect_moments(graph, layers, quantize, samples, runtime, context.folder, second=second, seed=context.seed)


def round_table(table: Array, precision: Precision, config: RoundingConfig) -> QuantizedWeight:
    """Round an embedding, [rows, columns], to nearest: columns are divided into groups."""
    size, levels = config.find_group_size(precision), config.find_levels(precision)
    symmetric = config.is_symmetric(precision)
    size = size if symmetric else find_grid_size(table.T, size)
    integers, scales, zeros = quantize_in_groups(table.T, size, levels, symmetric)
    return QuantizedWeight(np.ascontiguousarray(integers.T), scales, None, size, zeros)


def transpose_weight(weight: QuantizedWeight) -> QuantizedWeight:
    """Return an embedding as the weight of a linear layer. It has the same groups."""
    return replace(weight, integers=np.ascontiguousarray(weight.integers.T))


def make_quantizer(layer: Layer, plan: Plan) -> ActivationQuantizer:
    """Return the fake quantization of a layer's input under a plan."""
    smoothing = plan.smoothing.get(layer.input)
    if smoothing is None:
        return partial(fake_quantize_activation, limits=plan.ranges.get(layer.input, Range(0, 0)))
    return lambda rows: fake_quantize_activation(rows / smoothing.factors, smoothing.limits) * smoothing.factors


def find_scales(
    layer: Layer, matrix: Array, precision: Precision, config: RoundingConfig
) -> tuple[Array, Array | None, int | None]:
    """Find the scales of one matrix [in, out] of a layer, [groups, out], its zeros where it has some, and the inputs
    that share a scale, None for all of them."""
    group_size = config.find_group_size(precision) if layer.kind == "MatMul" else None
    if precision == "int4-weight" or group_size is not None:
        symmetric = config.is_symmetric(precision)
        group_size = group_size if symmetric else find_grid_size(matrix, group_size)
        return *fit_grid(matrix, group_size, config.find_levels(precision), symmetric), group_size
    if precision == "int8" and config.reduce_range:
        return reduced_range_scales(matrix, layer.shape[0 if layer.kind == "MatMul" else 1]), None, None
    return quantize_weight(matrix, 1)[1][None], None, None


def round_layer(
    layer: Layer,
    im2col: Im2Col,
    weight: Array,
    precision: Precision,
    observed: GraphMoments,
    smoothing: Smoothing | None,
    config: RoundingConfig,
    known: QuantizedWeight | None = None,
) -> QuantizedWeight:
    """Round a layer's weight. smoothing: of its input, if any. known: the same weight as another layer has it, which is
    then stored once."""
    levels, group_size, zeros = config.find_levels(precision), None, None
    factors = np.ones(1, np.float32) if smoothing is None else smoothing.factors
    matrices = im2col.unfold_weight(weight) * factors[:, None]
    integers, scales, corrections = [], [], []
    for index, matrix in enumerate(matrices):
        if known is not None and len(matrices) == 1:
            scale, zeros, group_size = known.scales, known.zeros, known.group_size
        else:
            scale, zeros, group_size = find_scales(layer, matrix, precision, config)
        steps = np.broadcast_to(expand_scales(scale, len(matrix), group_size), matrix.shape)
        shifts = 0.0 if zeros is None else expand_scales(zeros, len(matrix), group_size) * steps
        gram = observed.second[index]
        if gram.size:  # what is rounded to nearest is not observed
            gram = gram / np.outer(factors, factors)
        if known is not None and len(matrices) == 1:
            integers.append(im2col.unfold_weight(known.integers)[0])
        else:
            rounding = config.rounding if gram.size else "nearest"
            integers.append(
                round_weight(matrix, steps, gram, levels, rounding, shifts=shifts, act_order=config.act_order)
            )
        scales.append(scale)
        if config.bias_correction:
            kept, quantized = observed.total[index] @ (matrix / factors[:, None]), observed.quantized[index]
            restored = (integers[-1] * steps - shifts) / factors[:, None]
            corrections.append((kept - quantized @ restored) / max(observed.count, 1))
    return QuantizedWeight(
        im2col.fold_weight(np.stack(integers), layer.shape),
        np.concatenate(scales, axis=1),
        np.concatenate(corrections).astype(np.float32) if corrections else None,
        group_size,
        zeros,
    )
