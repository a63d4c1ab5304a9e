"""The model of an ONNX file between inputs and outputs with the batch first: its own nodes stay as they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx import ModelProto
from onnx_ir.passes import common

from export.capture.onnx_interface import Axis, InputLayout
from export.capture.source_file import HALVES
from laconic.arrays import Array
from laconic.tensor import BATCH


def adapt_inputs(proto: ModelProto, layouts: Sequence[InputLayout], *, free: bool) -> ir.Model:
    """Return the model with the batch first in each input, constants bound, and inputs of FP16 and BF16 given as FP32.

    free: whether a batch that is fixed to one row becomes free, also where a Reshape repeats it.
    """
    model = ir.from_proto(proto)
    common.RemoveInitializersFromInputsPass()(model)
    graph = model.graph
    for layout, value in zip(layouts, list(graph.inputs), strict=True):
        if layout.constant is not None:
            bind_constant(graph, value, layout.constant)
            continue
        sizes: list[int | str | None] = [*layout.axes]
        batch = sizes.pop(layout.place)
        public = [
            BATCH if free or batch != 1 else 1,
            *(BATCH if axis == batch != 1 and axis else axis for axis in sizes),
        ]
        if layout.place == 0 and value.dtype not in HALVES:
            value.shape = ir.Shape(public)
            continue
        feed(graph, value, public, layout.place)
    if free:
        for node in graph.all_nodes():
            for value in node.outputs:
                value.shape = None
        for node in list(graph):
            free_reshape(graph, node)
    return model


def bind_constant(graph: ir.Graph, value: ir.Value, array: Array) -> None:
    """Turn an input into a constant of the graph."""
    name = str(value.name)
    tensor = ir.tensor(array, dtype=value.dtype, name=name)
    constant = ir.Value(name=name, shape=ir.Shape(array.shape), type=value.type, const_value=tensor)
    value.replace_all_uses_with(constant)
    graph.inputs.remove(value)
    graph.register_initializer(constant)


def feed(graph: ir.Graph, value: ir.Value, shape: Sequence[Axis], place: int) -> None:
    """Let an input be given with the batch first and in FP32, in place of the file's own form."""
    name, kind = str(value.name), ir.DataType.FLOAT if value.dtype in HALVES else value.dtype
    public = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind) if kind else None)
    last, nodes = public, []
    if value.dtype != kind:
        nodes.append(ir.node("Cast", [last], attributes={"to": int(value.dtype or 0)}))
        last = nodes[-1].outputs[0]
    if place:
        order = [*range(1, place + 1), 0, *range(place + 1, len(shape))]
        nodes.append(ir.node("Transpose", [last], attributes={"perm": order}))
        last = nodes[-1].outputs[0]
    value.replace_all_uses_with(last)
    graph.inputs[graph.inputs.index(value)] = public
    graph.insert_before(graph[0], nodes)


def free_reshape(graph: ir.Graph, node: ir.Node) -> None:
    """Let a Reshape to a constant shape that begins with one row keep the rows that it gets."""
    if node.op_type != "Reshape" or node.domain or node.attributes.get_int("allowzero", 0) != 0:
        return
    shape = node.inputs[1]
    tensor = None if shape is None else ir.convenience.get_const_tensor(shape)
    if tensor is None or tensor.size == 0 or tensor.numpy()[0] != 1:
        return
    sizes = tensor.numpy().copy()
    sizes[0] = 0
    name = f"{node.outputs[0].name}.rows"
    kept = ir.Value(name=name, const_value=ir.tensor(sizes, name=name), type=ir.TensorType(ir.DataType.INT64))
    kept.shape = ir.Shape(sizes.shape)
    graph.register_initializer(kept)
    node.replace_input_with(1, kept)


@dataclass(frozen=True)
class OutputLayout:
    """How one output of a file is read. rank: its axes. place: which of them is the batch; -1 for an output of one row
    that has no axis for it, None for an output that does not depend on the samples, and is left out."""

    name: str
    rank: int
    place: int | None = 0


def adapt_outputs(model: ir.Model, layouts: Sequence[OutputLayout]) -> None:
    """Put the batch first in each output, in place, and give FP16 and BF16 as FP32."""
    graph = model.graph
    for layout, value in zip(layouts, list(graph.outputs), strict=True):
        value.shape = None  # files of some exporters state another one than they give
        if layout.place is None:
            graph.outputs.remove(value)
        elif layout.place or value.dtype in HALVES:
            graph.outputs[graph.outputs.index(value)] = give(graph, value, layout.place, layout.rank)


def give(graph: ir.Graph, value: ir.Value, place: int, rank: int) -> ir.Value:
    """Return an output with the batch first and in FP32 that is computed from one in the file's own form."""
    name, last = str(value.name), value
    kind = ir.DataType.FLOAT if value.dtype in HALVES else value.dtype
    value.name = f"{name}.file"
    if place < 0:
        first = ir.Value(name=f"{name}.first", const_value=ir.tensor(np.zeros(1, np.int64)))
        graph.register_initializer(first)
        last = append(graph, ir.node("Unsqueeze", [last, first]))
    elif place:
        others = [axis for axis in range(rank) if axis != place]
        last = append(graph, ir.node("Transpose", [last], attributes={"perm": [place, *others]}))
    if value.dtype in HALVES:
        last = append(graph, ir.node("Cast", [last], attributes={"to": int(ir.DataType.FLOAT)}))
    last.name, last.type = name, ir.TensorType(kind) if kind else None
    return last


def append(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """Append a node to a graph; returns its output."""
    graph.append(node)
    return node.outputs[0]
