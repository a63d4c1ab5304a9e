"""How long a layer takes on this machine, by its shape and its precision: measured once for each, and kept."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

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
    """Seconds of a layer by itself, with one engine. The entries are measured when they are asked for first."""

    option: Option
    cache: Cache
    measured: int = field(default=0)
    """How many were measured in this run, and not found."""

    def seconds(self, cell: Cell, batch: int, precision: Precision = "int8") -> float:
        """Of one layer like this, for so many samples, one of TRIAL_BATCHES, on one core; less what a run of the engine
        costs whatever is in it, which ten small layers of a model pay once."""
        found, nothing = self._run(cell, precision)[str(batch)], self._run(NOTHING, "float32")[str(TRIAL_BATCHES[0])]
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
                plan = Plan({layer.node: precision for layer in graph.layers}, dict.fromkeys(("x", "y"), Range(-1, 1)))
                model = Path(folder) / "model.onnx"
                self.option.build(graph, plan, model)
                rng = np.random.default_rng(0)
                with self.option.open(model, 1) as session:
                    return {
                        str(size): timed(session, {"x": rng.uniform(-1, 1, inputs(cell, size)).astype(np.float32)})
                        for size in TRIAL_BATCHES
                    }

        return dict(self.cache.json(f"cell-{key}", measure))

    def total(self, cells: Sequence[Cell], precision: Precision = "int8") -> dict[int, float]:
        """Seconds of all of them, by batch."""
        return {
            batch: sum(each.count * self.seconds(each, batch, precision) for each in cells) for batch in TRIAL_BATCHES
        }


def inputs(cell: Cell, batch: int) -> tuple[int, ...]:
    """The shape of a layer's input for so many samples."""
    return (batch * cell.shape[0], *cell.shape[1:])


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
    rng = np.random.default_rng(0)
    weight = rng.uniform(-1, 1, cell.weight).astype(np.float32)
    bias = rng.uniform(-1, 1, cell.weight[0]).astype(np.float32)
    if cell.kind == "linear":
        weight = np.ascontiguousarray(weight.T)
        nodes = [
            helper.make_node("MatMul", ["x", "weight"], ["product"], "cell/MatMul"),
            helper.make_node("Add", ["product", "bias"], ["y"], "cell/Add"),
        ]
        layer = Layer("cell/MatMul", "cell", "MatMul", "x", "weight", "product", weight.shape, 1)
    else:
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
        layer = Layer("cell/Conv", "cell", "Conv", "x", "weight", "result", weight.shape, 0)
    nodes.append(helper.make_node("ReduceMax", ["y"], ["z"], "largest/ReduceMax", keepdims=0))
    graph = helper.make_graph(
        nodes,
        "cell",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *cell.shape[1:]])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")],
    )
    path = folder / "cell.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10), path)
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", *cell.shape[1:]))
    return Graph(path, (spec,), (), (layer,), "cell")
