"""Weights in FP8 (E4M3)."""

import ml_dtypes
import numpy as np
from onnx import helper

from export.passes.rewrite import GraphRewriter
from laconic.arrays import Array
from laconic.quantization.graph import Layer
from laconic.quantization.qparams import FLOAT8_MAX


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
