"""Weights in FP8 (E4M3), and those that are only stored in fewer bits."""

import ml_dtypes
import numpy as np
from onnx import NodeProto, TensorProto, helper

from export.passes.half import to_half
from export.passes.opset import require_opset
from export.passes.rewrite import HALF_TYPES, GraphRewriter, make_cast
from laconic.arrays import Array
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Precision
from laconic.quantization.qparams import FLOAT8_MAX, quantize_along

LSTM_INPUTS = 8
"""The inputs of an LSTM, of which trailing ones may be left out."""


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
