"""Magnitudes of activations: which tensors of a graph would overflow in FP16."""

from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.capture.model_file import save_model
from export.passes.half import find_float_tensors
from laconic.arrays import Arrays
from laconic.quantization.graph import Graph
from laconic.runtimes.onnxruntime import OnnxRuntime

OVERFLOW_SAMPLES = 32
"""Samples whose activations are looked at."""
LARGEST = 65504.0
"""The largest number of FP16."""
SHOWN = 5
"""Tensors that are named."""
HEADROOM = 2.0
"""How much larger than on the samples seen a tensor may become before it overflows."""


def find_overflow(graph: Graph, batches: Iterable[Arrays], folder: Path) -> frozenset[str]:
    """Find the tensors of a float graph that exceed FP16: weights, and activations that come within HEADROOM of it.

    batches: inputs by name. folder: for the graph with every tensor as an output.
    """
    model = onnx.load(graph.path)
    floats = find_float_tensors(model)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    largest = {name: float(np.abs(weights[name]).max(initial=0)) for name in floats & weights.keys()}
    activations = measure_largest(model, floats - weights.keys(), batches, folder / "magnitudes.onnx")
    overflow = {name for name, value in largest.items() if value > LARGEST}
    return frozenset(overflow | {name for name, value in activations.items() if not value * HEADROOM <= LARGEST})


def describe_overflow(overflow: Collection[str]) -> str:
    """Say how many tensors exceed FP16, with the names of the first."""
    first = ", ".join(sorted(overflow)[:SHOWN])
    more = f" and {len(overflow) - SHOWN} more" if len(overflow) > SHOWN else ""
    return f"{len(overflow)} tensors" + (f": {first}{more}" if overflow else "")


def measure_largest(
    model: onnx.ModelProto, names: Collection[str], batches: Iterable[Arrays], path: Path
) -> dict[str, float]:
    """Measure the largest magnitude of each of these tensors. path: for the graph with them as outputs."""
    known = {value.name for value in (*model.graph.output, *model.graph.input)}
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in sorted(names) if name not in known
    )
    save_model(model, path)
    largest = dict.fromkeys(names, 0.0)
    with OnnxRuntime().open(path, optimize=False) as session:
        for batch in batches:
            for name, array in {**batch, **session.run(batch)}.items():
                if name in largest and array.size:
                    largest[name] = max(largest[name], float(np.abs(array).max()))
    return largest
