"""Embeddings in 4 and 8 bits whose groups of columns have a scale each: only the rows that are looked up are
dequantized."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.passes.rewrite import GraphRewriter
from export.passes.weight_packing import narrow, offset, pack_blocks, unpack_weight
from laconic.arrays import Array
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Bits, QuantizedWeight
from laconic.quantization.qparams import DEFAULT_GROUP_SIZE


def write_table(rewrite: GraphRewriter, layer: Layer, weight: QuantizedWeight, bits: Bits) -> None:
    """Write an embedding as the blocks of a linear layer with the same weight, transposed: a model whose head is its
    embedding has both once."""
    width = layer.shape[1]
    step = weight.group_size or DEFAULT_GROUP_SIZE
    name, node = layer.node, rewrite.nodes[layer.node]
    stem, ids, looked_up = f"{name}/weight", node.input[1], node.output[0]
    constants = {
        f"int{bits}": pack_blocks(weight.integers.T, step, bits),
        "scale": narrow(weight.scales.T),
        "zero": find_table_zeros(weight, bits),
        "last": np.array([-1], np.int64),
        "start": np.array([0], np.int64),
        "stop": np.array([width], np.int64),
    }
    known = {part: rewrite.set_initializer(f"{stem}/{part}", array) for part, array in constants.items()}
    source, blocks = known[f"int{bits}"], f"{stem}/blocks"
    rewrite.nodes[name].CopyFrom(helper.make_node("Gather", [source, ids], [blocks], name, axis=0))
    floats, zero = f"{stem}/floats", known["zero"]
    nodes = [
        helper.make_node("Cast", [blocks], [floats], f"{stem}/cast", to=TensorProto.FLOAT),
        helper.make_node("Gather", [known["scale"], ids], [f"{stem}/steps"], f"{stem}/scales", axis=0),
        helper.make_node("Cast", [f"{stem}/steps"], [f"{stem}/row"], f"{stem}/widen", to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", [f"{stem}/row", known["last"]], [f"{stem}/factors"], f"{stem}/columns"),
    ]
    if bits == 4:
        nodes += split_bytes(rewrite, stem, floats, ids, step)
        floats = f"{stem}/levels"
    if weight.zeros is not None:
        zero = f"{stem}/zeros/column"
        nodes += [
            helper.make_node("Gather", [known["zero"], ids], [f"{stem}/zeros/stored"], f"{stem}/zeros", axis=0),
            helper.make_node("Cast", [f"{stem}/zeros/stored"], [f"{stem}/zeros/row"], f"{stem}/zeros/widen", to=1),
            helper.make_node("Unsqueeze", [f"{stem}/zeros/row", known["last"]], [zero], f"{stem}/zeros/columns"),
        ]
    nodes += [
        helper.make_node("Sub", [floats, zero], [f"{stem}/centred"], f"{stem}/subtract"),
        helper.make_node("Mul", [f"{stem}/centred", f"{stem}/factors"], [f"{stem}/grouped"], f"{stem}/multiply"),
        helper.make_node("Shape", [ids], [f"{stem}/places"], f"{stem}/shape"),
        helper.make_node("Concat", [f"{stem}/places", known["last"]], [f"{stem}/whole"], f"{stem}/join", axis=0),
    ]
    is_padded = bool(width % step)
    row = f"{stem}/padded" if is_padded else looked_up
    nodes.append(helper.make_node("Reshape", [f"{stem}/grouped", f"{stem}/whole"], [row], f"{stem}/reshape"))
    if is_padded:
        bounds = [known["start"], known["stop"], known["last"]]
        nodes.append(helper.make_node("Slice", [row, *bounds], [looked_up], f"{stem}/slice"))
    rewrite.append_nodes(layer, nodes)


def find_table_zeros(weight: QuantizedWeight, bits: Bits) -> Array:
    """Return what is taken from the stored numbers of an embedding: one number, or one per row and group, in 8 bits
    where they are whole."""
    if weight.zeros is None:
        return np.array(offset(bits), np.float32)
    zeros = np.asarray(weight.zeros.T + offset(bits), np.float32)
    return zeros.astype(np.uint8) if np.array_equal(zeros.astype(np.uint8), zeros) else narrow(zeros)


def split_bytes(rewrite: GraphRewriter, stem: str, packed: str, ids: str, step: int) -> list[NodeProto]:
    """Make the nodes that split bytes [..., groups, bytes] float32 into two levels each, the first in the low half:
    [..., groups, step]. Floats hold them exactly, and every engine divides floats."""
    base = rewrite.set_initializer(f"{stem}/base", np.array(16, np.float32))
    last = rewrite.set_initializer(f"{stem}/last", np.array([-1], np.int64))
    block = rewrite.set_initializer(f"{stem}/block", np.array([-1, step], np.int64))
    high, low, halves = f"{stem}/high", f"{stem}/low", f"{stem}/halves"
    return [
        helper.make_node("Div", [packed, base], [f"{high}/quotient"], f"{high}/divide"),
        helper.make_node("Floor", [f"{high}/quotient"], [high], high),
        helper.make_node("Mul", [high, base], [f"{high}/shifted"], f"{high}/shift"),
        helper.make_node("Sub", [packed, f"{high}/shifted"], [low], low),
        helper.make_node("Unsqueeze", [low, last], [f"{low}/column"], f"{low}/unsqueeze"),
        helper.make_node("Unsqueeze", [high, last], [f"{high}/column"], f"{high}/unsqueeze"),
        helper.make_node("Concat", [f"{low}/column", f"{high}/column"], [halves], halves, axis=-1),
        helper.make_node("Shape", [ids], [f"{halves}/places"], f"{halves}/shape"),
        helper.make_node("Concat", [f"{halves}/places", block], [f"{halves}/whole"], f"{halves}/join", axis=0),
        helper.make_node("Reshape", [halves, f"{halves}/whole"], [f"{stem}/levels"], f"{stem}/interleave"),
    ]


def read_table(
    layer: Layer, node: NodeProto, table: NodeProto, nodes: Mapping[str, NodeProto], tensors: Mapping[str, TensorProto]
) -> QuantizedWeight:
    """Read what `write_table` wrote. node, table: those that look up the integers and the scales."""
    stem = f"{layer.node}/weight"
    bits: Bits = 4 if f"{stem}/high" in nodes else 8
    packed, scales = (numpy_helper.to_array(tensors[name]) for name in (node.input[0], table.input[0]))
    weight = unpack_weight(packed, [scales], packed.shape[-1] * 8 // bits, layer.shape[1], bits)
    zeros = None
    if (shift := nodes.get(f"{stem}/zeros")) is not None:
        zeros = numpy_helper.to_array(tensors[shift.input[0]]).T.astype(np.float32) - offset(bits)
    return replace(weight, integers=np.ascontiguousarray(weight.integers.T), zeros=zeros)
