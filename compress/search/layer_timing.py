"""Timing of a single layer: its graph runs in turns with a fixed reference layer, so that other load cancels."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.search.layer_spec import LayerSpec
from export.candidates.engine_option import EngineOption
from laconic.arrays import Array, Arrays
from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Precision, Range
from laconic.runtimes.runtime import Session, make_runtime
from laconic.tensor import TensorSpec

OPSET = 20
OUTPUT_WIDTH = 8
"""Output features of the layer that reads the result of attention."""
ATTENTION_INPUTS = ("queries", "keys", "values")
"""The tensors that the matrix products of attention read."""

REFERENCE_LAYER, REFERENCE_BATCH = LayerSpec("linear", (1, 128, 384), (384, 384)), 8
"""A millisecond or two of one core."""

WARMUP = 2
RUNS = 30
MAX_SECONDS = 0.05
"""Seconds for the timed runs, where RUNS of them would take longer."""


@dataclass(frozen=True)
class ReferenceTimer:
    """Times sessions of one engine relative to a reference layer.

    Load on the machine slows the timed session and the reference layer alike. Without the reference, a search that ran
    beside tests predicted every mild pruning to be too slow.
    """

    option: EngineOption
    cache: Cache

    def measure(self, session: Session, inputs: Mapping[str, Array]) -> float:
        """Measure a run in processor seconds, as if the machine were as fast as when the reference was first timed."""
        times: list[float] = []
        reference_times: list[float] = []
        with open_layer(REFERENCE_LAYER, self.option, "float32") as (reference, draw_inputs):
            reference_inputs = draw_inputs(REFERENCE_BATCH)
            for _ in range(WARMUP):
                session.run(inputs)
                reference.run(reference_inputs)
            while len(times) < RUNS and sum(times) < MAX_SECONDS:
                times.append(time_run(session, inputs))
                reference_times.append(time_run(reference, reference_inputs))
        return statistics.median(times) / statistics.median(reference_times) * self.reference_seconds

    @cached_property
    def reference_seconds(self) -> float:
        """Processor seconds of the reference layer when it was first timed on this machine, from the cache."""

        def measure() -> float:
            with open_layer(REFERENCE_LAYER, self.option, "float32") as (reference, draw_inputs):
                inputs = draw_inputs(REFERENCE_BATCH)
                for _ in range(WARMUP):
                    reference.run(inputs)
                return min(time_run(reference, inputs) for _ in range(RUNS))

        version = make_runtime(self.option.runtime).version()
        key = hash_of("reference-layer", self.option.name, version, this_machine().model_dump(), environment_digest())
        return float(self.cache.json(f"reference-layer-{key}", measure))


def time_run(session: Session, inputs: Mapping[str, Array]) -> float:
    """Measure the processor seconds of one run."""
    start = time.process_time()
    session.run(inputs)
    return time.process_time() - start


@contextmanager
def open_layer(
    spec: LayerSpec, option: EngineOption, precision: Precision
) -> Iterator[tuple[Session, Callable[[int], Arrays]]]:
    """Open a layer in an engine, on one thread; yields the session, and a function that draws inputs for a batch."""
    with tempfile.TemporaryDirectory() as folder:
        graph = write_graph(spec, Path(folder))
        ranges = dict.fromkeys(("x", "y", *ATTENTION_INPUTS), Range(-1, 1))
        model = Path(folder) / "model.onnx"
        option.build(graph, Plan({layer.node: precision for layer in graph.layers}, ranges), model)
        rng = np.random.default_rng(0)

        def draw_inputs(batch: int) -> Arrays:
            shape = (batch * spec.shape[0], *spec.shape[1:])
            return {tensor.name: rng.uniform(-1, 1, shape).astype(np.float32) for tensor in graph.inputs}

        with option.open(model, 1) as session:
            yield session, draw_inputs


def write_graph(spec: LayerSpec, folder: Path) -> Graph:
    """Write a graph of the layer with a bias, and a ReLU after a convolution.

    The layer's input is x, its output y. The graph's output is a single number, so that the time does not include
    writing a large output.
    """
    draw = np.random.default_rng(0)
    shape = spec.weight or (OUTPUT_WIDTH, spec.shape[-1])
    weight = draw.uniform(-1, 1, shape).astype(np.float32)
    bias = draw.uniform(-1, 1, shape[0]).astype(np.float32)
    inputs = ["x"]
    constants: list[TensorProto] = []
    if spec.kind == "conv":
        nodes, layer = make_convolution(spec)
    else:
        weight = np.ascontiguousarray(weight.T)
        nodes, layer = make_linear(weight.shape)
    if spec.kind == "attention":
        before, constants = make_attention(spec)
        nodes, inputs = [*before, *nodes], ["q", "k", "v"]
    nodes.append(helper.make_node("ReduceMax", ["y"], ["z"], "largest/ReduceMax", keepdims=0))
    axes: list[str | int] = ["batch", *spec.shape[1:]]
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, axes) for name in inputs],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias"), *constants],
    )
    path = folder / "layer.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10), path)
    specs = tuple(TensorSpec(name=name, dtype="float32", shape=("batch", *spec.shape[1:])) for name in inputs)
    return Graph(path, specs, (), (layer,), "layer")


def make_linear(shape: tuple[int, ...]) -> tuple[list[NodeProto], Layer]:
    """Make the nodes for y = x @ weight + bias."""
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"], "layer/MatMul"),
        helper.make_node("Add", ["product", "bias"], ["y"], "layer/Add"),
    ]
    return nodes, Layer("layer/MatMul", "layer", "MatMul", "x", "weight", "product", shape, 1)


def make_convolution(spec: LayerSpec) -> tuple[list[NodeProto], Layer]:
    """Make the nodes for y = relu(conv(x))."""
    convolution = helper.make_node(
        "Conv",
        ["x", "weight", "bias"],
        ["result"],
        "layer/Conv",
        strides=spec.stride,
        pads=spec.padding * 2,
        dilations=spec.dilation,
        group=spec.groups,
    )
    nodes = [convolution, helper.make_node("Relu", ["result"], ["y"], "relu/Relu")]
    return nodes, Layer("layer/Conv", "layer", "Conv", "x", "weight", "result", spec.weight, 0)


def make_attention(spec: LayerSpec) -> tuple[list[NodeProto], list[TensorProto]]:
    """Make nodes and constants for multi-head attention, x = softmax(q k) v, in the form in which it is captured.

    A layer with few outputs must read x: the placement quantizes attention only where layers are quantized.
    """
    heads = spec.groups
    split = np.array([0, 0, heads, spec.shape[-1] // heads], np.int64)
    whole = np.array([0, 0, spec.shape[-1]], np.int64)
    nodes = []
    orders = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    for name, transposed, order in zip("qkv", ATTENTION_INPUTS, orders, strict=True):
        nodes.append(helper.make_node("Reshape", [name, "parted"], [f"{name}/parts"], f"{name}/Reshape"))
        nodes.append(helper.make_node("Transpose", [f"{name}/parts"], [transposed], f"{name}/Transpose", perm=order))
    nodes += [
        helper.make_node("MatMul", ["queries", "keys"], ["scores"], "scores/MatMul"),
        helper.make_node("Softmax", ["scores"], ["shares"], "shares/Softmax", axis=-1),
        helper.make_node("MatMul", ["shares", "values"], ["mixed"], "mixed/MatMul"),
        helper.make_node("Transpose", ["mixed"], ["back"], "back/Transpose", perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["back", "whole"], ["x"], "whole/Reshape"),
    ]
    return nodes, [numpy_helper.from_array(split, "parted"), numpy_helper.from_array(whole, "whole")]
