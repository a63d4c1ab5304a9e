"""Weights in FP8 (E4M3), in 4 bits in the form that each engine reads, and those that are only stored in fewer bits."""

from typing import Any

import ml_dtypes
import numpy as np
from onnx import NodeProto, TensorProto, helper

from export.passes.half import to_half
from export.passes.opset import raise_opset, require_opset
from export.passes.rewrite import HALF_TYPES, GraphRewriter, make_cast
from laconic.arrays import Array
from laconic.errors import UnsupportedPrecision
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Precision, QuantizedWeight
from laconic.quantization.qparams import DEFAULT_GROUP_SIZE, FLOAT8_MAX, INT4_RANGE, quantize_along

OPSET = 21
"""The first opset in which Cast and DequantizeLinear take INT4."""
LSTM_INPUTS = 8
"""The inputs of an LSTM, of which trailing ones may be left out."""
BLOCK_SIZES = (64, 128)
"""Inputs that may share a scale in TensorRT 11 (its developer guide, "Quantization Granularities")."""


def write_int4_weight(rewrite: GraphRewriter, layer: Layer, rounded: QuantizedWeight, form: str | None) -> None:
    """Write the weight of a linear layer in 4 bits.

    form: "blocks": MatMulNBits, an operator of ONNX Runtime that multiplies with weights in 4 bits. "dequantize": a
    DequantizeLinear with a scale per block of inputs. "cast": casts and a product, which the engine computes once when
    it loads. Raises UnsupportedPrecision where the engine has neither, or
    the layer is of another kind.
    """
    if form is None or layer.kind != "MatMul":
        raise UnsupportedPrecision(
            f"{layer.module} ({layer.kind}) was to keep its weight in 4 bits, and this engine reads no such weight. "
            f"Try 8 bits (bits: 8), or another engine (runtimes)"
        )
    if form == "blocks":
        write_blocks(rewrite, layer, rounded)
    elif form == "dequantize":
        write_dequantized(rewrite, layer, rounded)
    else:
        write_cast(rewrite, layer, rounded)


def write_blocks(rewrite: GraphRewriter, layer: Layer, rounded: QuantizedWeight) -> None:
    """Write MatMulNBits: per output, blocks of inputs with a scale each, two to a byte, the first in the low half."""
    rows, width = layer.shape
    step = rounded.group_size or DEFAULT_GROUP_SIZE
    integers = pad_inputs(rounded.integers, step).T.reshape(width, -1, step)
    scales = np.broadcast_to(rounded.scales, (integers.shape[1], width))
    stem, node = f"{layer.node}/weight", rewrite.nodes[layer.node]
    packed = rewrite.set_initializer(f"{stem}/int4", pack_nibbles(integers[..., 0::2], integers[..., 1::2]))
    steps = rewrite.set_initializer(f"{stem}/scale", scales.T.reshape(-1))
    require_opset(rewrite.model, "com.microsoft", 1)
    # accuracy_level 0: arithmetic in the engine's float. From 4 on it would quantize the activations, too.
    settings: dict[str, Any] = {"K": rows, "N": width, "bits": 4, "block_size": step, "accuracy_level": 0}
    node.CopyFrom(
        helper.make_node(
            "MatMulNBits", [node.input[0], packed, steps], node.output, node.name, domain="com.microsoft", **settings
        )
    )


def write_dequantized(rewrite: GraphRewriter, layer: Layer, rounded: QuantizedWeight) -> None:
    """Write INT4 with a DequantizeLinear whose blocks share a scale. Raises UnsupportedPrecision for blocks of a size
    that TensorRT does not read."""
    step = rounded.group_size or layer.shape[0]
    if step not in BLOCK_SIZES:
        raise UnsupportedPrecision(
            f"{layer.module} has a scale for each {step} of its inputs, and TensorRT reads blocks of "
            f"{' or '.join(map(str, BLOCK_SIZES))} in 4 bits. Set group_size: {BLOCK_SIZES[-1]}"
        )
    raise_opset(rewrite.model, OPSET, "a weight in 4 bits")
    stem = f"{layer.node}/weight"
    packed = rewrite.set_tensor(make_int4(f"{stem}/int4", rounded.integers))
    scales = rewrite.set_initializer(f"{stem}/scale", rounded.scales)
    node = helper.make_node("DequantizeLinear", [packed, scales], [stem], f"{stem}/DQ", axis=0, block_size=step)
    rewrite.replace_weight(layer, [node], stem)


def write_cast(rewrite: GraphRewriter, layer: Layer, rounded: QuantizedWeight) -> None:
    """Write INT4 with a cast by way of INT32, which OpenVINO folds; cast directly, it would quantize activations."""
    raise_opset(rewrite.model, OPSET, "a weight in 4 bits")
    rows, width = layer.shape
    step = rounded.group_size or rows
    integers = pad_inputs(rounded.integers, step)
    stem = f"{layer.node}/weight"
    packed = rewrite.set_tensor(make_int4(f"{stem}/int4", integers.reshape(-1, step, width)))
    scales = rewrite.set_initializer(f"{stem}/scale", rounded.scales[:, None])
    shape = rewrite.set_initializer(f"{stem}/shape", np.array(integers.shape, np.int64))
    nodes = [
        helper.make_node("Cast", [packed], [f"{stem}/int32"], f"{stem}/int32", to=TensorProto.INT32),
        helper.make_node("Cast", [f"{stem}/int32"], [f"{stem}/floats"], f"{stem}/floats", to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{stem}/floats", scales], [f"{stem}/groups"], f"{stem}/multiply"),
        helper.make_node("Reshape", [f"{stem}/groups", shape], [f"{stem}/whole"], f"{stem}/reshape"),
    ]
    if len(integers) > rows:
        places = {"from": 0, "to": rows, "axis": 0}
        ends = [rewrite.set_initializer(f"{stem}/{name}", np.array([at], np.int64)) for name, at in places.items()]
        nodes.append(helper.make_node("Slice", [f"{stem}/whole", *ends], [f"{stem}/cut"], f"{stem}/slice"))
    rewrite.replace_weight(layer, nodes, nodes[-1].output[0])


def make_int4(name: str, array: Array) -> TensorProto:
    """Make an INT4 tensor. array: int8, from -8 to 7."""
    flat = np.append(array.reshape(-1), np.zeros(array.size % 2, np.int8)).view(np.uint8) & 15
    nibbles = (flat[0::2] | flat[1::2] << 4).astype(np.uint8)
    return helper.make_tensor(name, TensorProto.INT4, array.shape, nibbles.tobytes(), raw=True)


def pack_nibbles(low: Array, high: Array) -> Array:
    """Pack two numbers within INT4_RANGE into each byte, as offsets from the lowest."""
    first, second = ((half.astype(np.int16) - INT4_RANGE[0]).astype(np.uint8) for half in (low, high))
    return np.asarray(first | second << 4, np.uint8)


def pad_inputs(integers: Array, step: int) -> Array:
    """Pad integers [in, out] with zeros to a multiple of `step` inputs."""
    return np.pad(integers, ((0, -len(integers) % step), (0, 0)))


def write_float8_weight(rewrite: GraphRewriter, layer: Layer) -> None:
    """Write the weight of a layer in FP8, with a DequantizeLinear and one scale per output channel."""
    values, scale = quantize_float8(rewrite.array(layer.weight), layer.axis)
    stem = f"{layer.node}/weight"
    weight = rewrite.set_initializer(f"{stem}/float8", values)
    scales = rewrite.set_initializer(f"{stem}/scale", scale)
    node = helper.make_node("DequantizeLinear", [weight, scales], [stem], f"{stem}/DQ", axis=layer.axis)
    rewrite.replace_weight(layer, [node], stem)


def quantize_float8(weight: Array, axis: int) -> tuple[Array, Array]:
    """Round a weight to float8_e4m3fn with one scale per slice along `axis`; returns it and the scales [axis] float32.

    Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    others = tuple(other for other in range(weight.ndim) if other != axis)
    scale = np.maximum(np.abs(weight).max(axis=others) / FLOAT8_MAX, np.finfo(np.float32).tiny).astype(np.float32)
    shape = [1] * weight.ndim
    shape[axis] = -1
    scaled = np.clip(weight / scale.reshape(shape), -FLOAT8_MAX, FLOAT8_MAX)
    return scaled.astype(ml_dtypes.float8_e4m3fn), scale


def write_stored_weights(rewrite: GraphRewriter, layer: Layer, precision: Precision) -> None:
    """Write the weights of a layer in a precision, and nodes that compute them in float when the engine loads them."""
    if precision == "int8-dynamic":
        write_dynamic_lstm(rewrite, layer)
        return
    nodes: list[NodeProto] = []
    for weight in layer.stored:
        array = rewrite.array(weight.name)
        if precision in HALF_TYPES:
            half = rewrite.set_initializer(f"{weight.name}/half", to_half(array, HALF_TYPES[precision]))
            name = f"{weight.name}/widen"
            nodes.append(helper.make_node("Cast", [half], [weight.name], name, to=TensorProto.FLOAT))
        elif precision != "float32":
            integers, scale = quantize_along(array, weight.axes)
            rewrite.set_initializer(f"{weight.name}/int8", integers)
            rewrite.set_initializer(f"{weight.name}/scale", scale)
            nodes += make_cast(f"{weight.name}/int8", f"{weight.name}/scale", weight.name)
    rewrite.insert_before(layer.node, nodes)


def write_dynamic_lstm(rewrite: GraphRewriter, layer: Layer) -> None:
    """Write DynamicQuantizeLSTM, an operator of ONNX Runtime that multiplies in INT8 with the range of each input. Its
    weights are those of an LSTM, transposed."""
    node = rewrite.nodes[layer.node]
    require_opset(rewrite.model, "com.microsoft", 1)
    inputs = [*node.input, *[""] * (LSTM_INPUTS - len(node.input))]
    for place, weight in zip((1, 2), layer.stored, strict=True):
        integers, scale = quantize_along(rewrite.array(weight.name), weight.axes)
        inputs[place] = rewrite.set_initializer(f"{weight.name}/int8", integers.transpose(0, 2, 1))
        inputs.append(rewrite.set_initializer(f"{weight.name}/scale", scale[..., 0]))
        inputs.append(rewrite.set_initializer(f"{weight.name}/zero", np.zeros(scale.shape[:2], np.int8)))
    attributes = [
        each for each in node.attribute if each.name != "layout"
    ]  # ONNX Runtime runs no other than the default
    node.CopyFrom(helper.make_node("DynamicQuantizeLSTM", inputs, node.output, node.name, domain="com.microsoft"))
    node.attribute.extend(attributes)
