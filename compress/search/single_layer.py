"""A layer alone in an engine: what a table times."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.search.layer_spec import Cell
from export.build import EngineOption
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Precision, Range
from laconic.runtimes.runtime import Session
from laconic.tensor import Arrays, TensorSpec

OPSET = 20
COLUMNS = 8
"""Columns of the layer that reads what attention gives."""
ATTENDED = ("queries", "keys", "values")
"""The tensors that the products of attention read."""


@contextmanager
def alone(cell: Cell, option: EngineOption, precision: Precision) -> Iterator[tuple[Session, Callable[[int], Arrays]]]:
    """The layer in an engine, in one thread; and what makes inputs for so many samples."""
    with tempfile.TemporaryDirectory() as folder:
        graph = write(cell, Path(folder))
        seen = dict.fromkeys(("x", "y", *ATTENDED), Range(-1, 1))
        model = Path(folder) / "model.onnx"
        option.build(graph, Plan({layer.node: precision for layer in graph.layers}, seen), model)
        rng = np.random.default_rng(0)

        def drawn(batch: int) -> Arrays:
            shape = (batch * cell.shape[0], *cell.shape[1:])
            return {spec.name: rng.uniform(-1, 1, shape).astype(np.float32) for spec in graph.inputs}

        with option.open(model, 1) as session:
            yield session, drawn


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
