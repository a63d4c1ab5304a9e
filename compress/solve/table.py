"""How long a layer takes on this machine, by its shape and its precision: measured once for each, and kept."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.solve.cell import Cell
from laconic.artifact import make_runtime
from laconic.cache import Cache
from laconic.graph import Graph, Layer
from laconic.hardware import this_machine
from laconic.plan import Plan, Precision, Range
from laconic.race import TRIAL_BATCHES
from laconic.record import code_version, hash_of
from laconic.runtimes.runtime import Session
from laconic.tensor import Array, TensorSpec
from laconic.trial import Option

OPSET = 20
COLUMNS = 8
"""Columns of the layer that reads what attention gives."""
ATTENDED = ("queries", "keys", "values")
"""The tensors that the products of attention read."""
WARMUP = 2
RUNS = 30
NOTHING = Cell("linear", (1, 8), (8, 8))
"""A layer that costs no more than the run that it is in: 45 us in OpenVINO."""

LEAST = 0.02
"""The share of its own run that a layer costs at least."""

PATIENCE = 0.05
"""Seconds for the runs of one cell, where RUNS of them would take longer."""


@dataclass
class Table:
    """Seconds of a layer by itself, with one engine. The entries are measured when they are asked for first.

    precision: of the layers.
    """

    option: Option
    cache: Cache
    precision: Precision = "int8"
    measured: int = field(default=0)
    """How many were measured in this run, and not found."""

    def seconds(self, cell: Cell, batch: int) -> float:
        """Of one layer like this, for so many samples, one of TRIAL_BATCHES, on one core; less what a run of the engine
        costs whatever is in it, which ten small layers of a model pay once."""
        found, nothing = (
            self._run(cell, self.precision)[str(batch)],
            self._run(NOTHING, "float32")[str(TRIAL_BATCHES[0])],
        )
        return max(found - nothing, LEAST * found)

    def _run(self, cell: Cell, precision: Precision) -> dict[str, float]:
        """Seconds of a graph of this layer alone, by batch."""
        engine = make_runtime(self.option.runtime)
        key = hash_of(
            "cell",
            cell.signature,
            TRIAL_BATCHES,
            precision,
            self.option.name,
            engine.version(),
            this_machine().model_dump(),
            code_version(),
        )

        def measure() -> dict[str, float]:
            self.measured += 1
            with tempfile.TemporaryDirectory() as folder:
                graph = write(cell, Path(folder))
                seen = dict.fromkeys(("x", "y", *ATTENDED), Range(-1, 1))
                plan = Plan({layer.node: precision for layer in graph.layers}, seen)
                model = Path(folder) / "model.onnx"
                self.option.build(graph, plan, model)
                rng = np.random.default_rng(0)
                with self.option.open(model, 1) as session:

                    def drawn(batch: int) -> dict[str, Array]:
                        shape = (batch * cell.shape[0], *cell.shape[1:])
                        return {spec.name: rng.uniform(-1, 1, shape).astype(np.float32) for spec in graph.inputs}

                    return {str(size): timed(session, drawn(size)) for size in TRIAL_BATCHES}

        return dict(self.cache.json(f"cell-{key}", measure))

    def total(self, cells: Sequence[Cell]) -> dict[int, float]:
        """Seconds of all of them, by batch."""
        return {batch: sum(each.count * self.seconds(each, batch) for each in cells) for batch in TRIAL_BATCHES}


def timed(session: Session, inputs: Mapping[str, Array]) -> float:
    """Seconds of the processor for one run: the least of several, which is what other programs disturb least."""
    for _ in range(WARMUP):
        session.run(inputs)
    found: list[float] = []
    while len(found) < RUNS and sum(found) < PATIENCE:
        start = time.process_time()
        session.run(inputs)
        found.append(time.process_time() - start)
    return min(found)


def write(cell: Cell, folder: Path) -> Graph:
    """A graph of this layer alone, with a bias, an activation behind a convolution, and one number as the result, so
    that it is not the writing of answers that is timed. x is its input, y what the layer makes."""
    draw = np.random.default_rng(0)
    shape = cell.weight or (COLUMNS, cell.shape[-1])
    weight = draw.uniform(-1, 1, shape).astype(np.float32)
    bias = draw.uniform(-1, 1, shape[0]).astype(np.float32)
    inputs = ["x"]
    constants: list[TensorProto] = []
    if cell.kind == "conv":
        nodes, layer = convolution(cell)
    else:
        weight = np.ascontiguousarray(weight.T)
        nodes, layer = product(weight.shape)
    if cell.kind == "attention":
        before, constants = attention(cell)
        nodes, inputs = [*before, *nodes], ["q", "k", "v"]
    nodes.append(helper.make_node("ReduceMax", ["y"], ["z"], "largest/ReduceMax", keepdims=0))
    axes: list[str | int] = ["batch", *cell.shape[1:]]
    graph = helper.make_graph(
        nodes,
        "cell",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, axes) for name in inputs],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias"), *constants],
    )
    path = folder / "cell.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10), path)
    specs = tuple(TensorSpec(name=name, dtype="float32", shape=("batch", *cell.shape[1:])) for name in inputs)
    return Graph(path, specs, (), (layer,), "cell")


def product(shape: tuple[int, ...]) -> tuple[list[NodeProto], Layer]:
    """y = x @ weight + bias."""
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"], "cell/MatMul"),
        helper.make_node("Add", ["product", "bias"], ["y"], "cell/Add"),
    ]
    return nodes, Layer("cell/MatMul", "cell", "MatMul", "x", "weight", "product", shape, 1)


def convolution(cell: Cell) -> tuple[list[NodeProto], Layer]:
    """y = relu(conv(x))."""
    settings: dict[str, Any] = {
        "strides": cell.stride,
        "pads": cell.padding * 2,
        "dilations": cell.dilation,
        "group": cell.groups,
    }
    nodes = [
        helper.make_node("Conv", ["x", "weight", "bias"], ["result"], "cell/Conv", **settings),
        helper.make_node("Relu", ["result"], ["y"], "relu/Relu"),
    ]
    return nodes, Layer("cell/Conv", "cell", "Conv", "x", "weight", "result", cell.weight, 0)


def attention(cell: Cell) -> tuple[list[NodeProto], list[TensorProto]]:
    """x = softmax(q k) v, by heads, as it is captured; a layer of few outputs is to read it, since attention is in INT8
    where layers are."""
    heads = cell.groups
    parted = np.array([0, 0, heads, cell.shape[-1] // heads], np.int64)
    whole = np.array([0, 0, cell.shape[-1]], np.int64)
    nodes = []
    for name, turned, order in zip("qkv", ATTENDED, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
        nodes.append(helper.make_node("Reshape", [name, "parted"], [f"{name}/parts"], f"{name}/Reshape"))
        nodes.append(helper.make_node("Transpose", [f"{name}/parts"], [turned], f"{name}/Transpose", perm=order))
    nodes += [
        helper.make_node("MatMul", ["queries", "keys"], ["scores"], "scores/MatMul"),
        helper.make_node("Softmax", ["scores"], ["shares"], "shares/Softmax", axis=-1),
        helper.make_node("MatMul", ["shares", "values"], ["mixed"], "mixed/MatMul"),
        helper.make_node("Transpose", ["mixed"], ["back"], "back/Transpose", perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["back", "whole"], ["x"], "whole/Reshape"),
    ]
    return nodes, [numpy_helper.from_array(parted, "parted"), numpy_helper.from_array(whole, "whole")]
