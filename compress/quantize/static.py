"""INT8 weights and activations, ranges calibrated; the layers that this harms most are kept in more bits."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import onnx
from onnx import numpy_helper

from compress.quantize.calibrate import drawn, observe, singles
from compress.quantize.learned_ranges import learned_ranges
from compress.quantize.quantized_layers import chosen
from compress.quantize.ranges import METHODS
from compress.quantize.rounding import Rounding
from compress.quantize.sensitivity import flights, harms
from compress.quantize.smoothquant import smooth_all
from compress.quantize.weight_adjustment import Adjustment, adjusted
from laconic.data.dataset import Dataset
from laconic.hashing import code_version, hash_of
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Ladder, Plan, Precision, Range, Smoothing
from laconic.recipes.stage import PlanContext, PlanStage
from laconic.runtimes.runtime import make_runtime
from laconic.tensor import Array, Arrays


class Static(PlanStage):
    """INT8 weights and activations, ranges calibrated; those that `quantize.qat` has learned are taken as they are.

    method: how a range is found; what outliers carry is lost by all but minmax. samples: how many to calibrate with.
    smooth: move the spread of the channels of activations into the weights, where that pays; such a tensor keeps
    everything that was seen, whatever the method. rounding: which way each weight goes. bias_correction: put the mean
    error of each layer into its bias. keep: layers, by name or pattern, that stay in float. mixed: measure each layer's
    harm once, and lift the worst ones to more bits until the goal is met.
    """

    method: Literal["minmax", "percentile", "entropy", "mse"] = "minmax"
    samples: int = 256
    smooth: bool = True
    rounding: Rounding = "nearest"
    bias_correction: bool = True
    keep: tuple[str, ...] = ()
    mixed: bool = True

    def plan(self, graph: Graph, context: PlanContext) -> Ladder:
        kept = chosen(graph.layers, self.keep)
        lowest: dict[str, Precision] = {}
        for layer in graph.layers:
            arithmetic: Precision = "int8-weight" if layer.kind == "Gather" else "int8"
            lowest[layer.node] = "float32" if layer.node in kept else arithmetic
        quantized = [layer for layer in graph.layers if lowest[layer.node] == "int8"]
        datasets = drawn(context, self.samples)
        ranges, smoothing = self.calibrated(graph, quantized, datasets, context)
        learned = learned_ranges(context.history, quantized)
        smoothing = {tensor: each for tensor, each in smoothing.items() if tensor not in learned}
        plan = Plan(lowest, ranges | learned, smoothing)
        if self.rounding != "nearest" or self.bias_correction:
            adjustment = Adjustment(self.rounding, bias=self.bias_correction)
            plan = adjusted(graph, plan, adjustment, datasets, context)
        if not self.mixed:
            return Ladder.of(plan)
        harm = harms(graph, plan, context)
        return Ladder(flights(graph.layers, plan, harm), harm)

    def calibrated(
        self, graph: Graph, quantized: Sequence[Layer], datasets: Sequence[Dataset], context: PlanContext
    ) -> tuple[dict[str, Range], dict[str, Smoothing]]:
        """The range of every quantizable tensor, and the smoothing of those in front of linear layers."""
        whole = datasets[0]
        names = [layer.node for layer in quantized]
        key = hash_of("calibrate", graph.key, whole.fingerprint, self.method, self.smooth, names, code_version())

        def compute() -> Arrays:
            with context.steps.step(f"calibrate ({self.method})", sum(map(len, datasets))) as step:

                def counted() -> Iterator[Arrays]:
                    for batch in singles(datasets, context.task):
                        yield batch
                        step.advance()

                seen = observe(graph, counted(), make_runtime("onnxruntime"), context.folder, context.seed)
                ranges = {
                    name: METHODS[self.method](each) for name, each in seen.histograms.items() if each.counts.any()
                }
                readers = weights_by_input(graph, quantized) if self.smooth else {}
                smoothing = smooth_all(seen.channels, readers)
                step.note = f"{len(whole)} samples, {len(ranges)} tensors, {len(smoothing)} smoothed"
            return packed(ranges, smoothing)

        return unpacked(context.cache.arrays(f"calibrated-{key}", compute))


def weights_by_input(graph: Graph, layers: Sequence[Layer]) -> dict[str, list[Array]]:
    """The weights [in, out] that each tensor is multiplied with."""
    initializers = {tensor.name: tensor for tensor in onnx.load(graph.path).graph.initializer}
    readers: dict[str, list[Array]] = {}
    for layer in layers:
        if layer.kind == "MatMul":
            readers.setdefault(layer.input, []).append(numpy_helper.to_array(initializers[layer.weight]))
    return readers


def packed(ranges: dict[str, Range], smoothing: dict[str, Smoothing]) -> Arrays:
    """As arrays, for the cache."""
    arrays = {f"range:{name}": np.array([each.low, each.high]) for name, each in ranges.items()}
    for name, each in smoothing.items():
        arrays[f"factors:{name}"] = each.factors
        arrays[f"limits:{name}"] = np.array([each.limits.low, each.limits.high])
    return arrays


def unpacked(arrays: Arrays) -> tuple[dict[str, Range], dict[str, Smoothing]]:
    """What `packed` was given."""
    ranges: dict[str, Range] = {}
    smoothing: dict[str, Smoothing] = {}
    for key, array in arrays.items():
        kind, _, name = key.partition(":")
        if kind == "range":
            ranges[name] = Range(float(array[0]), float(array[1]))
        elif kind == "factors":
            low, high = arrays[f"limits:{name}"]
            smoothing[name] = Smoothing(array, Range(float(low), float(high)))
    return ranges, smoothing
