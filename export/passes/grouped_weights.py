"""Weights in 4 and 8 bits whose groups of inputs have a scale each, in the form that each engine reads; and where a
graph has the weights in 8 bits of other layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.passes.opset import raise_opset, require_opset
from export.passes.rewrite import GraphRewriter
from export.passes.weight_packing import (
    make_int4,
    narrow,
    offset,
    pack_blocks,
    pack_levels,
    pad_inputs,
    unpack_weight,
)
from laconic.arrays import Array
from laconic.errors import UnsupportedPrecision
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Bits, Form, QuantizedWeight
from laconic.quantization.qparams import DEFAULT_GROUP_SIZE, INT4_RANGE

OPSET = 21
"""The first opset in which Cast and DequantizeLinear take INT4."""
BLOCK_SIZES = (64, 128)
"""Inputs that may share a scale in TensorRT 11 (its developer guide, "Quantization Granularities")."""
BLOCKS = "MatMulNBits"
"""The operator that multiplies with blocks of weights in 4 or 8 bits."""


def write_grouped_weight(
    rewrite: GraphRewriter, layer: Layer, weight: QuantizedWeight, bits: Bits, form: Form | None
) -> None:
    """Write the weight of a linear layer or an embedding.

    form: "blocks": an operator that multiplies with the weights as they are stored. "dequantize": a DequantizeLinear
    with a scale per block of inputs. "cast": casts and a product, which the engine computes once when it loads. Of an
    embedding the rows that are looked up are dequantized, whatever the form. Raises UnsupportedPrecision where the
    engine has none, or the layer is of another kind.
    """
    if layer.kind == "Gather":
        write_table(rewrite, layer, weight, bits)
        return
    if form is None or layer.kind != "MatMul":
        raise UnsupportedPrecision(
            f"{layer.module} ({layer.kind}) was to keep its weight in {bits} bits with a scale for each group of "
            f"inputs, and this engine reads no such weight. Try 8 bits (bits: 8) without group_size, or another engine "
            f"(runtimes)"
        )
    if form == "blocks":
        write_blocks(rewrite, layer, weight, bits)
    elif form == "dequantize":
        write_dequantized(rewrite, layer, weight)
    else:
        write_cast(rewrite, layer, weight, bits)


def write_blocks(rewrite: GraphRewriter, layer: Layer, weight: QuantizedWeight, bits: Bits) -> None:
    """Write MatMulNBits: per output, blocks of inputs with a scale each; of 4 bits two to a byte, the first in the low
    half."""
    rows, width = layer.shape
    step = weight.group_size or DEFAULT_GROUP_SIZE
    stem, node = f"{layer.node}/weight", rewrite.nodes[layer.node]
    packed = rewrite.set_initializer(f"{stem}/int{bits}", pack_blocks(weight.integers, step, bits))
    blocks = -(-rows // step)
    steps = write_scales(rewrite, layer, stem, np.broadcast_to(weight.scales, (blocks, width)).T)
    inputs = [node.input[0], packed, steps]
    if weight.zeros is not None:
        levels = np.rint(weight.zeros).clip(*INT4_RANGE)
        inputs.append(rewrite.set_initializer(f"{stem}/zero", pack_levels(levels.T, bits)))
        if (shift := levels - weight.zeros).any():
            add_shift(rewrite, layer, shift, step, steps)
    require_opset(rewrite.model, "com.microsoft", 1)
    # accuracy_level 0: arithmetic in the engine's float. From 4 on it would quantize the activations, too.
    settings: dict[str, Any] = {"K": rows, "N": width, "bits": bits, "block_size": step, "accuracy_level": 0}
    node.CopyFrom(helper.make_node(BLOCKS, inputs, node.output, node.name, domain="com.microsoft", **settings))


def add_shift(rewrite: GraphRewriter, layer: Layer, shift: Array, step: int, scales: str) -> None:
    """Add to a product what its zeros are short of: each group's sum of inputs times it and the scale. shift: [groups,
    out]. step: inputs of a group. scales: the name of the scales.

    An operator with zeros that are no levels is up to 10 times as slow (OpenVINO 2026.4, one thread of a Xeon with
    AVX512-VNNI).
    """
    stem, node = f"{layer.node}/weight", rewrite.nodes[layer.node]
    rows, groups = layer.shape[0], len(shift)
    members = np.repeat(np.eye(groups, dtype=np.float32), step, axis=0)[:rows]
    result, product = node.output[0], f"{stem}/levels"
    node.output[0] = product
    known = rewrite.set_initializer(f"groups/{rows}/{groups}", members)
    stored = rewrite.set_initializer(f"{stem}/shift", shift.T)
    nodes = [
        helper.make_node("MatMul", [node.input[0], known], [f"{stem}/sums"], f"{stem}/sums"),
        helper.make_node("Mul", [stored, scales], [f"{stem}/scaled"], f"{stem}/scaled"),
        helper.make_node("Transpose", [f"{stem}/scaled"], [f"{stem}/turned"], f"{stem}/turned", perm=[1, 0]),
        helper.make_node("MatMul", [f"{stem}/sums", f"{stem}/turned"], [f"{stem}/shifts"], f"{stem}/shifts"),
        helper.make_node("Add", [product, f"{stem}/shifts"], [result], f"{stem}/shifted"),
    ]
    rewrite.append_nodes(layer, nodes)


def write_scales(rewrite: GraphRewriter, layer: Layer, stem: str, scales: Array) -> str:
    """Write the scales of a layer, in FP16 where that represents them; return the name of them in FP32."""
    name = f"{stem}/scale"
    stored = rewrite.set_initializer(f"{name}/stored", narrow(scales))
    if rewrite.array(stored).dtype == np.float32:
        return stored
    cast = helper.make_node("Cast", [stored], [name], f"{name}/widen", to=TensorProto.FLOAT)
    rewrite.insert_before(layer.node, [cast])
    return name


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


def write_dequantized(rewrite: GraphRewriter, layer: Layer, weight: QuantizedWeight) -> None:
    """Write INT4 with a DequantizeLinear whose blocks share a scale. Raises UnsupportedPrecision for blocks of a size
    that TensorRT does not read, and for zeros, which it does not read either."""
    step = weight.group_size or layer.shape[0]
    if step not in BLOCK_SIZES or weight.zeros is not None:
        raise UnsupportedPrecision(
            f"{layer.module} has a scale for each {step} of its inputs{'' if weight.zeros is None else ', and zeros'}, "
            f"and TensorRT reads symmetric blocks of {' or '.join(map(str, BLOCK_SIZES))} in 4 bits. Set group_size: "
            f"{BLOCK_SIZES[-1]}, symmetric: true"
        )
    raise_opset(rewrite.model, OPSET, "a weight in 4 bits")
    stem = f"{layer.node}/weight"
    packed = rewrite.set_tensor(make_int4(f"{stem}/int4", weight.integers))
    scales = rewrite.set_initializer(f"{stem}/scale", weight.scales)
    node = helper.make_node("DequantizeLinear", [packed, scales], [stem], f"{stem}/DQ", axis=0, block_size=step)
    rewrite.replace_weight(layer, [node], stem)


def write_cast(rewrite: GraphRewriter, layer: Layer, weight: QuantizedWeight, bits: Bits) -> None:
    """Write integers with a cast by way of INT32, which OpenVINO folds; cast directly, it would quantize
    activations."""
    rows, width = layer.shape
    step = weight.group_size or rows
    integers = pad_inputs(weight.integers, step)
    stem = f"{layer.node}/weight"
    if bits == 4:
        raise_opset(rewrite.model, OPSET, "a weight in 4 bits")
        packed = rewrite.set_tensor(make_int4(f"{stem}/int4", integers.reshape(-1, step, width)))
    else:
        packed = rewrite.set_initializer(f"{stem}/int8", integers.reshape(-1, step, width))
    scales = write_scales(rewrite, layer, stem, weight.scales[:, None])
    shape = rewrite.set_initializer(f"{stem}/shape", np.array(integers.shape, np.int64))
    floats = f"{stem}/floats"
    nodes = [
        helper.make_node("Cast", [packed], [f"{stem}/int32"], f"{stem}/int32", to=TensorProto.INT32),
        helper.make_node("Cast", [f"{stem}/int32"], [floats], floats, to=TensorProto.FLOAT),
    ]
    if weight.zeros is not None:
        zero = rewrite.set_initializer(f"{stem}/zero", weight.zeros[:, None])
        nodes.append(helper.make_node("Sub", [floats, zero], [f"{stem}/centred"], f"{stem}/subtract"))
        floats = f"{stem}/centred"
    nodes += [
        helper.make_node("Mul", [floats, scales], [f"{stem}/groups"], f"{stem}/multiply"),
        helper.make_node("Reshape", [f"{stem}/groups", shape], [f"{stem}/whole"], f"{stem}/reshape"),
    ]
    if len(integers) > rows:
        places = {"from": 0, "to": rows, "axis": 0}
        ends = [rewrite.set_initializer(f"{stem}/{name}", np.array([at], np.int64)) for name, at in places.items()]
        nodes.append(helper.make_node("Slice", [f"{stem}/whole", *ends], [f"{stem}/cut"], f"{stem}/slice"))
    rewrite.replace_weight(layer, nodes, nodes[-1].output[0])


def read_grouped_weight(
    layer: Layer, nodes: Mapping[str, NodeProto], tensors: Mapping[str, TensorProto]
) -> QuantizedWeight | None:
    """Read the weight of a layer whose groups of inputs have scales; None where it has another form. nodes, tensors: of
    the graph that it was written to, by name."""
    node, stem = nodes.get(layer.node), f"{layer.node}/weight"
    table, cast = nodes.get(f"{stem}/scales"), nodes.get(f"{stem}/int32")
    if node is not None and node.op_type == BLOCKS:
        settings = {attribute.name: attribute.i for attribute in node.attribute}
        bits: Bits = 4 if settings["bits"] == 4 else 8
        names = [node.input[1], find_scales(nodes, stem), *node.input[3:4]]
        packed, *parameters = (numpy_helper.to_array(tensors[name]) for name in names)
        weight = unpack_weight(packed, parameters, settings["block_size"], settings["K"], bits)
        if weight.zeros is not None and (scaled := nodes.get(f"{stem}/scaled")) is not None:
            weight = replace(weight, zeros=weight.zeros - numpy_helper.to_array(tensors[scaled.input[0]]).T)
        return weight
    if node is not None and table is not None:
        return read_table(layer, node, table, nodes, tensors)
    if cast is None or len(tensors[cast.input[0]].dims) < 3:
        return None
    integers = numpy_helper.to_array(tensors[cast.input[0]]).astype(np.int8)
    scales = numpy_helper.to_array(tensors[find_scales(nodes, stem)]).astype(np.float32)
    shift = nodes.get(f"{stem}/subtract")
    return QuantizedWeight(
        integers.reshape(-1, integers.shape[-1])[: layer.shape[0]],
        scales[:, 0],
        group_size=integers.shape[1],
        zeros=None if shift is None else numpy_helper.to_array(tensors[shift.input[1]])[:, 0],
    )


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


def find_scales(nodes: Mapping[str, NodeProto], stem: str) -> str:
    """Return the name of the scales that `write_scales` stored, which equal ones of another layer may stand for."""
    if (widening := nodes.get(f"{stem}/scale/widen")) is not None:
        return str(widening.input[0])
    product = nodes.get(f"{stem}/multiply")
    return str(nodes[stem.removesuffix("/weight")].input[2] if product is None else product.input[1])


def find_weight_names(nodes: Mapping[str, NodeProto], layer: str) -> tuple[str, str]:
    """Find the names of the integers and scales that a layer reads, which layers with the same weight share; names of
    nothing where it is not in 8 bits."""
    stem = f"{layer}/weight"
    if (whole := nodes.get(f"{stem}/DQ")) is not None:
        return whole.input[0], whole.input[1]
    cast, product = nodes.get(f"{stem}/int32"), nodes.get(f"{stem}/multiply")
    return (cast.input[0], product.input[1]) if cast is not None and product is not None else ("", "")
