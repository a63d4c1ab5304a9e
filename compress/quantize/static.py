"""INT8 weights and activations, ranges calibrated; the layers that this harms most are kept in more bits."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from compress.quantize.calibrate import observe
from compress.quantize.layers import chosen
from compress.quantize.ranges import METHODS
from compress.quantize.sensitivity import harms, rungs
from laconic.artifact import make_runtime
from laconic.data import Dataset, batches
from laconic.graph import Graph
from laconic.plan import Ladder, Plan, Precision, Range
from laconic.record import code_version, hash_of
from laconic.stage import PlanContext, PlanStage
from laconic.tensor import Arrays


class Static(PlanStage):
    """INT8 weights and activations, ranges calibrated.

    method: how a range is found. samples: how many to calibrate with. keep: layers, by name or pattern, that stay in
    float. mixed: measure each layer's harm once, and lift the worst ones to more bits until the goal is met.
    """

    method: Literal["minmax", "percentile", "entropy", "mse"] = "minmax"
    samples: int = 256
    keep: tuple[str, ...] = ()
    mixed: bool = True

    def plan(self, graph: Graph, context: PlanContext) -> Ladder:
        kept = chosen(graph.layers, self.keep)
        dataset = context.calibrate.take(self.samples, context.seed)
        ranges = calibrated(graph, dataset, self.method, context)
        lowest: dict[str, Precision] = {}
        for layer in graph.layers:
            lowest[layer.node] = (
                "float32" if layer.node in kept else "int8-weight" if layer.kind == "Gather" else "int8"
            )
        if not self.mixed:
            return Ladder((Plan(lowest, ranges),))
        harm = harms(graph, lowest, ranges, context)
        return Ladder(tuple(Plan(rung, ranges) for rung in rungs(graph.layers, lowest, harm)), harm)


def calibrated(graph: Graph, dataset: Dataset, method: str, context: PlanContext) -> dict[str, Range]:
    """The range of every quantizable tensor. One sample a run: padding is not counted, and lengths may vary."""

    def compute() -> dict[str, tuple[float, float]]:
        with context.steps.step(f"calibrate ({method})", len(dataset)) as step:

            def singles() -> Iterator[Arrays]:
                for _, batch in batches(dataset, context.task, 1):
                    yield batch
                    step.advance()

            histograms = observe(graph, singles(), make_runtime("onnxruntime"), context.folder)
            found = {name: METHODS[method](histogram) for name, histogram in histograms.items()}
            step.note = f"{len(dataset)} samples, {len(found)} tensors"
        return {name: (limits.low, limits.high) for name, limits in found.items() if np.isfinite(limits.low)}

    key = hash_of("calibrate", graph.key, dataset.fingerprint, method, code_version())
    return {name: Range(*limits) for name, limits in context.cache.json(key, compute).items()}
