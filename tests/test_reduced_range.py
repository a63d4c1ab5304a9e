"""Reduced range: weights with which the engines' kernels cannot saturate, on processors with and without VNNI."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.quantize.rounding import reduced_range_scales
from laconic.runtimes.runtime import make_runtime


def quantized_product(kind, integers, scales, largest):
    """A graph with one product: inputs from 0 to 1, signed weights, and outputs from 0 to `largest`, all in 8 bits."""
    axis = 0 if kind == "Conv" else 1
    constants = {
        "w": integers,
        "ws": np.asarray(scales, np.float32),
        "wz": np.zeros(len(scales), np.int8),
        "xs": np.float32(1 / 255),
        "ys": np.float32(largest / 255),
        "zero": np.uint8(0),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=axis),
        helper.make_node(kind, ["xd", "wd"], ["product"]),
        helper.make_node("QuantizeLinear", ["product", "ys", "zero"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "ys", "zero"], ["y"]),
    ]
    shape = ["batch", integers.shape[1], *integers.shape[2:]] if kind == "Conv" else ["batch", len(integers)]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))],
        [numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("kind", ["MatMul", "Conv"])
@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_with_a_reduced_range_an_engine_on_this_processor_computes_what_the_integers_say(
    kind, channels, engine, tmp_path
):
    width, size = 32, 3 if kind == "Conv" else 1
    rng = np.random.default_rng(0)
    matrix = np.abs(rng.standard_normal((channels * size * size, width))).astype(np.float32)
    scales = reduced_range_scales(matrix, channels)
    integers = np.rint(matrix / scales).astype(np.int8)
    exact = 255 * integers.sum(axis=0, dtype=np.int64) * scales[0] / 255
    folded = integers.T.reshape(width, channels, size, size) if kind == "Conv" else integers
    model = tmp_path / "model.onnx"
    onnx.save(quantized_product(kind, folded, scales[0], exact.max()), model)
    values = np.ones((1, channels, size, size) if kind == "Conv" else (4, channels), np.float32)
    with make_runtime(engine).open(model) as session:
        found = session.run({"x": values})["y"]
    assert np.abs(found.reshape(-1, width)[0] - exact).max() <= exact.max() / 255


def test_only_neighbours_of_one_sign_reduce_the_range():
    weight = np.asarray([[1.0, 1.0, 1.0], [-1.0, 1.0, 0.0], [0.5, 0.0, 1.0], [0.0, 0.0, 0.0]], np.float32)
    assert (reduced_range_scales(weight, 4) * 127).tolist() == [[1.0, 2.0, 1.0]]
    assert (reduced_range_scales(np.ones((9, 1), np.float32), 1) * 127).tolist() == [[1.0]]
    assert (reduced_range_scales(np.ones((9, 2), np.float32), 1) * 127).tolist() == [[2.0, 2.0]]
    assert (reduced_range_scales(np.zeros((4, 2), np.float32), 4) > 0).all()
