"""Static quantization: INT8 weights and activations with calibrated ranges; sensitive layers keep higher precision."""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import onnx
from onnx import numpy_helper

from compress.quantize.calibration import draw_calibration_samples, observe_activations, single_sample_batches
from compress.quantize.plan_rounding import RoundingConfig, round_plans
from compress.quantize.ranges import RANGE_METHODS, read_learned_ranges
from compress.quantize.rounding import Rounding
from compress.quantize.sensitivity import make_ladder
from compress.quantize.smoothquant import smooth_tensors
from export.passes.rewrite import read_tensors
from laconic.arrays import Array, Arrays
from laconic.data.dataset import Dataset
from laconic.hashing import environment_digest, hash_of
from laconic.models.layer_patterns import match_layers
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Precision, PrecisionLadder, Range, Smoothing
from laconic.quantization.plan_file import pack_plan, unpack_ranges, unpack_smoothing
from laconic.recipes.stage import PlanContext, PlanStage
from laconic.runtimes.runtime import make_runtime
from laconic.units import format_fidelity

DYNAMIC_WIDTH = 192
"""The width of the state from which on an LSTM runs in dynamic INT8 where an engine can (ONNX Runtime). Then its answer
depends on the other samples of a batch, and the server takes one sample at a time. Speed over float at batch 1 and 8
(2 layers, 30 steps, one core of a Xeon with AVX512-VNNI): 1.0 and 1.4 x for a width of 128, 1.7 and 2.1 x for 192, 2.0
and 2.5 x for 256, 5.5 and 4.5 x for 640. Weights in 8 bits alone change no speed."""


class Static(PlanStage):
    """INT8 weights and activations with calibrated ranges; ranges learned by `quantize.qat` replace calibrated ones.

    dtype: int8, or float8 (E4M3) for linear layers on a target that has it; SmoothQuant, rounding, reduce_range and
    bias correction are for INT8. method: calibration method; all but minmax clip outliers. samples: number of
    calibration samples. smoothquant: apply SmoothQuant to the tensors where it pays; these have min-max ranges,
    whatever the method. rounding: rounding method of the weights. reduce_range: scales of the weights with
    which sums of products cannot saturate on a processor with AVX2 and without VNNI; auto: on such a processor, where
    it is more faithful. bias_correction: add the mean error of each layer to its bias. keep: layers, by name or
    pattern, that stay in float. mixed_precision: where the goal is missed, measure the sensitivity of each layer once,
    and keep the most sensitive ones in higher precision until the goal is met. measure_sensitivity: also where the goal
    is met, for the report.
    """

    renamed: ClassVar[Mapping[str, str]] = {"smooth": "smoothquant", "mixed": "mixed_precision"}

    dtype: Literal["int8", "float8"] = "int8"
    method: Literal["minmax", "percentile", "entropy", "mse"] = "minmax"
    samples: int = 256
    smoothquant: bool = True
    rounding: Rounding = "nearest"
    bias_correction: bool = True
    reduce_range: bool | Literal["auto"] = "auto"
    keep: tuple[str, ...] = ()
    mixed_precision: bool = True
    measure_sensitivity: bool = False

    def plan(self, graph: Graph, context: PlanContext) -> PrecisionLadder:
        kept = match_layers(graph.layers, self.keep)
        lowest: dict[str, Precision] = {}
        for layer in graph.layers:
            lowest[layer.node] = "float32" if layer.node in kept else lowest_precision(layer, self.dtype)
        quantized = [layer for layer in graph.layers if lowest[layer.node] == self.dtype]
        datasets = draw_calibration_samples(context, self.samples)
        ranges, smoothing = self.calibrate(graph, quantized, datasets, context)
        learned = read_learned_ranges(context.history, quantized)
        smoothing = {tensor: factors for tensor, factors in smoothing.items() if tensor not in learned}
        plan = Plan(lowest, ranges | learned, smoothing)
        if self.dtype == "int8":
            plan = self.round(graph, plan, datasets, context)
        if not self.mixed_precision:
            return PrecisionLadder.of(plan)
        return make_ladder(graph, plan, context, measure=self.measure_sensitivity)

    def round(self, graph: Graph, plan: Plan, datasets: Sequence[Dataset], context: PlanContext) -> Plan:
        """Return the plan with rounded weights; with the range that is more faithful where `reduce_range` is auto."""
        tried = (False, context.int8_saturates) if self.reduce_range == "auto" else (self.reduce_range,)
        configs = [
            RoundingConfig(self.rounding, bias_correction=self.bias_correction, reduce_range=candidate)
            for candidate in dict.fromkeys(tried)
        ]
        if configs == [RoundingConfig()]:
            return plan
        plans = round_plans(graph, plan, configs, datasets, context)
        if len(plans) == 1:
            return plans[0]
        with context.steps.step("choose the range of the weights", len(plans)) as step:
            divergences = []
            for candidate in plans:
                divergences.append(float(context.trial(candidate).mean()))
                step.advance()
            step.note = "; ".join(
                f"{'reduced' if config.reduce_range else 'whole'}: {format_fidelity(1 - divergence)}"
                for config, divergence in zip(configs, divergences, strict=True)
            )
        return plans[divergences.index(min(divergences))]

    def calibrate(
        self, graph: Graph, quantized: Sequence[Layer], datasets: Sequence[Dataset], context: PlanContext
    ) -> tuple[dict[str, Range], dict[str, Smoothing]]:
        """Yield the range of every quantizable tensor, and the smoothing of inputs of linear layers."""
        whole = datasets[0]
        names = [layer.node for layer in quantized]
        smoothquant = self.smoothquant and self.dtype == "int8"
        drawn = [dataset.fingerprint for dataset in datasets]
        key = hash_of(
            "calibrate", graph.key, drawn, self.method, smoothquant, names, context.seed, environment_digest()
        )

        def compute() -> Arrays:
            with context.steps.step(f"calibrate ({self.method})", sum(map(len, datasets))) as step:

                def stream() -> Iterator[Arrays]:
                    for batch in single_sample_batches(datasets, context.task):
                        yield batch
                        step.advance()

                runtime = make_runtime("onnxruntime")
                observed = observe_activations(
                    graph, stream(), runtime, context.folder, context.seed, counted=self.method != "minmax"
                )
                find_range = RANGE_METHODS[self.method]
                ranges = {
                    name: find_range(histogram)
                    for name, histogram in observed.histograms.items()
                    if not histogram.is_empty
                }
                readers = weights_by_input(graph, quantized) if smoothquant else {}
                smoothing = smooth_tensors(observed.channels, readers)
                step.note = f"{len(whole)} samples, {len(ranges)} tensors, {len(smoothing)} smoothed"
            return pack_plan(Plan({}, ranges, smoothing))

        arrays = context.cache.arrays(f"calibrated-{key}", compute)
        return unpack_ranges(arrays), unpack_smoothing(arrays)


def lowest_precision(layer: Layer, dtype: Precision) -> Precision:
    """Return the lowest precision of a layer. dtype: of linear layers and convolutions."""
    if layer.kind == "LSTM" and layer.stored[-1].shape[-1] >= DYNAMIC_WIDTH:
        return "int8-dynamic"
    return "int8-weight" if layer.kind == "Gather" or layer.stored else dtype


def weights_by_input(graph: Graph, layers: Sequence[Layer]) -> dict[str, list[Array]]:
    """Return the weights [in, out] that each tensor is multiplied with; without tensors of which a weight has other
    readers, since a weight that is scaled for one input cannot be stored once."""
    whole = onnx.load(graph.path).graph
    initializers = {tensor.name: tensor for tensor in whole.initializer}
    inner = {tensor for node in whole.node for tensor in read_tensors(node) if tensor not in node.input}
    inputs: dict[str, set[str]] = {}
    for layer in layers:
        inputs.setdefault(layer.weight, set()).add(layer.input)
    shared = {tensor for name, each in inputs.items() if len(each) > 1 or name in inner for tensor in each}
    readers: dict[str, list[Array]] = {}
    for layer in layers:
        if layer.kind == "MatMul" and layer.input not in shared:
            readers.setdefault(layer.input, []).append(numpy_helper.to_array(initializers[layer.weight]))
    return readers
