"""Weights in 4 bits, the way each engine reads them."""

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from export.passes.rewrite import Rewrite
from laconic.errors import UnsupportedPrecision
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Rounded
from laconic.quantization.qparams import FOUR_BITS, GROUP
from laconic.tensor import Array

OPSET = 21
"""From this version on a Cast takes INT4. Of all that captured graphs hold, it changed the meaning of one operator."""
CHANGED = "GroupNormalization"


def write(rewrite: Rewrite, layer: Layer, rounded: Rounded, form: str | None) -> None:
    """Keep the weight of a linear layer in 4 bits.

    form: `blocks`: MatMulNBits, an operator of ONNX Runtime's own, which multiplies with weights that stay in 4 bits.
    `cast`: by casts and a product that the engine computes once, when it loads. Raises UnsupportedPrecision where the
    engine has no form, or the layer is of another kind.
    """
    if form is None or layer.kind != "MatMul":
        raise UnsupportedPrecision(
            f"{layer.module} ({layer.kind}) was to keep its weight in 4 bits, and this engine reads no such weight. "
            f"Try 8 bits (bits: 8), or another engine (runtimes)"
        )
    if form == "blocks":
        blocks(rewrite, layer, rounded)
    else:
        cast(rewrite, layer, rounded)


def blocks(rewrite: Rewrite, layer: Layer, rounded: Rounded) -> None:
    """Per output, blocks of inputs with a scale each; in a byte two neighbours, the first in the low half."""
    rows, width = layer.shape
    step = rounded.group or GROUP
    integers = padded(rounded.integers, step).T.reshape(width, -1, step)
    scales = np.broadcast_to(rounded.scales, (integers.shape[1], width))
    stem, node = f"{layer.node}/weight", rewrite.nodes[layer.node]
    packed = rewrite.set_initializer(f"{stem}/int4", bytes_of(integers[..., 0::2], integers[..., 1::2]))
    steps = rewrite.set_initializer(f"{stem}/scale", scales.T.reshape(-1))
    rewrite.require("com.microsoft", 1)
    # accuracy_level 0: in the engine's float. From 4 on it would quantize the activations, too, unasked.
    settings: dict[str, Any] = {"K": rows, "N": width, "bits": 4, "block_size": step, "accuracy_level": 0}
    node.CopyFrom(
        helper.make_node(
            "MatMulNBits", [node.input[0], packed, steps], node.output, node.name, domain="com.microsoft", **settings
        )
    )


def cast(rewrite: Rewrite, layer: Layer, rounded: Rounded) -> None:
    """INT4, widened by way of INT32: OpenVINO computes this once; from INT4 straight it would quantize activations."""
    if rewrite.require("", OPSET) < OPSET and any(node.op_type == CHANGED for node in rewrite.nodes.values()):
        raise UnsupportedPrecision(
            f"weights in 4 bits need ONNX opset {OPSET}, in which {CHANGED}, which this graph holds, means something "
            f"else. Try 8 bits (bits: 8), or onnxruntime (runtimes)"
        )
    rows, width = layer.shape
    step = rounded.group or rows
    integers = padded(rounded.integers, step)
    stem = f"{layer.node}/weight"
    packed = rewrite.set_int4(f"{stem}/int4", integers.reshape(-1, step, width))
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
    rewrite.put(layer, nodes, nodes[-1].output[0])


def bytes_of(low: Array, high: Array) -> Array:
    """Two numbers within FOUR_BITS in a byte each, counted from the lowest."""
    first, second = ((half.astype(np.int16) - FOUR_BITS[0]).astype(np.uint8) for half in (low, high))
    return np.asarray(first | second << 4, np.uint8)


def padded(integers: Array, step: int) -> Array:
    """[in, out], with zeros up to a multiple of `step` inputs."""
    return np.pad(integers, ((0, -len(integers) % step), (0, 0)))
