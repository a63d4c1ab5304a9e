"""Rounding by what flows into a layer: never worse than the nearest, and written as it was decided."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from captured import inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from models import save_embedder
from onnx import helper, numpy_helper

from compress.quantize.graph_moments import MEMORY_LIMIT, LayerInput, collect_moments, split_by_memory
from compress.quantize.im2col import Im2Col
from compress.quantize.rounding import gptq, round_weight
from export.capture.capture import capture
from export.placements.place import place
from laconic import registry
from laconic.errors import UnsupportedPrecision
from laconic.models.source_loading import load_source
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, QuantizedWeight
from laconic.quantization.qparams import INT4_RANGE, expand_scales, fit_grid, quantize_in_groups, quantize_weight
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import make_runtime
from laconic.tensor import TensorSpec

ENGINES = ("onnxruntime", "openvino")
X = TensorSpec(name="x", dtype="float32", shape=("batch", 4))


def rules(engine):
    return registry.resolve("placement", engine)["float32"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    checkpoint = load_source(save_embedder(folder / "source"))
    return checkpoint, capture(checkpoint, folder)


def one_layer(folder, node, weight, more=(), opset=20):
    """A graph of one layer, `l`, which reads x, and of the nodes behind it, which give y."""
    layer = Layer("l", "layer", node.op_type, node.input[0], "w", node.output[0], weight.shape, axis_of(node))
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in {"w": weight, **dict(more)}.items()]
    nodes = [node]
    if more:
        nodes.append(helper.make_node("Add", [node.output[0], "b"], ["y"], "add"))
    free = {"MatMul": ["n", weight.shape[0]], "Conv": ["n", *weight.shape[1:2], "h", "w"]}
    ends = [
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, free[node.op_type]),
        helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None),
    ]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    path = folder / "float.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return Graph(path, (X,), (X,), (layer,), "key")


def axis_of(node):
    return 1 if node.op_type == "MatMul" else 0


def correlated(count, width, seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, 4)) @ rng.standard_normal((4, width)) + 0.3).astype(np.float32)


@settings(max_examples=20)
@given(
    st.integers(2, 24),
    st.integers(1, 12),
    st.integers(0, 99),
    st.sampled_from(["adaround", "gptq"]),
    st.sampled_from(["8 bits", "4 bits", "zeros"]),
)
def test_no_output_is_farther_off_than_by_rounding_to_the_nearest(width, out, seed, rounding, form):
    rows = correlated(50, width, seed)
    weight = np.random.default_rng(seed).standard_normal((width, out)).astype(np.float32)
    weight[::3] = 0
    gram = rows.T.astype(np.float64) @ rows / len(rows)
    levels, zeros = (-127, 127) if form == "8 bits" else INT4_RANGE, None
    if form == "8 bits":
        scales = np.tile(quantize_weight(weight, 1)[1], (width, 1))
    else:
        scales, zeros = fit_grid(weight, 16, symmetric=form == "4 bits")
        scales = expand_scales(scales, width, 16)
    zeros = np.zeros_like(scales) if zeros is None else expand_scales(zeros, width, 16)
    shifts = zeros * scales
    nearest, found = (round_weight(weight, scales, gram, levels, each, shifts=shifts) for each in ("nearest", rounding))
    assert found.dtype == np.int8
    assert found.min() >= levels[0]
    assert found.max() <= levels[1]
    if (zeros == np.rint(zeros)).all():
        assert (found == zeros)[::3].all(), "what pruning made zero stays zero"
    changes = [each.astype(np.float64) * scales - weight - shifts for each in (found, nearest)]
    errors = [(change * (gram @ change)).sum(axis=0) for change in changes]
    assert (errors[0] <= errors[1] * (1 + 1e-9)).all()


@pytest.mark.parametrize(("rounding", "left"), [("adaround", 0.7), ("gptq", 0.4)])
def test_correlated_inputs_leave_far_less_error(rounding, left):
    rows = correlated(400, 64, 0) + 0.1 * np.random.default_rng(1).standard_normal((400, 64)).astype(np.float32)
    weight = np.random.default_rng(2).standard_normal((64, 32)).astype(np.float32)
    gram = rows.T.astype(np.float64) @ rows / len(rows)
    scales, _ = fit_grid(weight, 32)
    scales = expand_scales(scales, 64, 32)
    nearest, found = (round_weight(weight, scales, gram, INT4_RANGE, each) for each in ("nearest", rounding))
    exact = rows @ weight
    worse, better = (((rows @ (each * scales) - exact) ** 2).mean() for each in (nearest, found))
    assert better < left * worse


def test_adaround_takes_one_of_the_two_neighbours():
    weight = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    rows = correlated(100, 32, 1)
    scales = np.full_like(weight, 0.1)
    found = round_weight(weight, scales, rows.T.astype(np.float64) @ rows / 100, (-127, 127), "adaround")
    assert (np.abs(found - weight / scales) <= 1 + 1e-4).all()


@settings(max_examples=30)
@given(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(0, 2),
    st.sampled_from([1, 2]),
)
def test_a_convolution_is_a_product_of_its_patches(axes, kernel, stride, dilation, pad, groups):
    torch.manual_seed(0)
    values = torch.randn(2, 4, *(7 + axis for axis in range(axes)))
    weight = torch.randn(6, 4 // groups, *([kernel] * axes))
    convolve = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d}[axes]
    expected = convolve(values, weight, None, stride, pad, dilation, groups).numpy()
    im2col = Im2Col(groups, (stride,) * axes, (dilation,) * axes, (pad,) * (2 * axes))
    rows = im2col.unfold_input(values.numpy(), weight.shape[2:], np.random.default_rng(0))
    total, count = im2col.sum_input(values.numpy(), weight.shape[2:])
    assert count == rows.shape[1]
    np.testing.assert_allclose(total, rows.sum(axis=1), atol=1e-4)
    found = rows @ im2col.unfold_weight(weight.numpy())  # [groups, places, out of a group]
    flat = np.moveaxis(expected, 1, -1).reshape(-1, groups, 6 // groups).transpose(1, 0, 2)
    np.testing.assert_allclose(found, flat, atol=1e-4)
    np.testing.assert_array_equal(
        im2col.fold_weight(im2col.unfold_weight(weight.numpy()), weight.shape), weight.numpy()
    )


@pytest.mark.parametrize(("auto", "expected"), [("SAME_UPPER", (0, 1)), ("SAME_LOWER", (1, 0)), ("VALID", (0, 0))])
def test_padding_that_follows_from_the_size(auto, expected):
    layer = Layer("n", "n", "Conv", "x", "w", "y", (1, 1, 2), 0)
    im2col = Im2Col.of(helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=auto), layer)
    assert im2col.padding((8,), (2,))[2:] == [expected]


def test_patches_of_a_large_input_are_sampled_and_second_moments_are_held_within_a_budget():
    rows = Im2Col(1, (1, 1), (1, 1), (0, 0, 0, 0)).unfold_input(
        np.ones((1, 2, 90, 90)), (1, 1), np.random.default_rng(0)
    )
    assert rows.shape == (1, 4096, 2)
    total, count = Im2Col(1, (1, 1), (1, 1), (0, 0, 0, 0)).sum_input(np.ones((1, 2, 93, 90)), (1, 1))
    assert count == 47 * 90
    assert total.tolist() == [[count, count]]
    layers = [Layer(f"n{n}", "m", "MatMul", f"x{n // 2}", "w", "y", (1000, 10), 1) for n in range(8)]
    inputs = {layer: LayerInput(layer.input, Im2Col(), (), False) for layer in layers}
    assert [len(part) for part in split_by_memory(inputs, 22_000_000)] == [4, 4]
    assert [len(part) for part in split_by_memory(inputs, 1)] == [2, 2, 2, 2], "a tensor that two layers read is one"
    assert [len(part) for part in split_by_memory(inputs, MEMORY_LIMIT)] == [8]


def test_moments_are_those_of_what_a_layer_reads(embedder, tmp_path):
    checkpoint, graph = embedder
    layers = [layer for layer in graph.layers if layer.kind == "MatMul"][:4]
    batches = [inputs(checkpoint, 1, 5 + seed, seed) for seed in range(3)]
    found = list(collect_moments(graph, layers, {}, lambda: batches, OnnxRuntime(), tmp_path, second=True))
    assert [layer for layer, _, _ in found] == sorted(layers, key=lambda layer: layer.input)
    for layer, _, each in found:
        assert each.count == sum(batch["input_ids"].size for batch in batches)
        assert each.gram.shape == (1, layer.shape[0], layer.shape[0])
        np.testing.assert_allclose(each.gram, each.gram.transpose(0, 2, 1), atol=1e-3)
        np.testing.assert_array_equal(each.total, each.quantized)


def adjusted_plan(graph, precision, group_size=None):
    """Integers that nobody would round to, for every linear layer, and those integers times their scales."""
    rng = np.random.default_rng(0)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(graph.path).graph.initializer}
    weights, values = {}, {}
    for layer in graph.layers:
        if layer.kind == "MatMul":
            width = layer.shape[0]
            if precision == "int4-weight":
                integers, scales, _ = quantize_in_groups(stored[layer.weight], group_size)
                integers = np.clip(integers + rng.integers(-1, 2, integers.shape), *INT4_RANGE).astype(np.int8)
            else:
                integers, scales = quantize_weight(stored[layer.weight], 1)
                integers = np.clip(integers + rng.integers(-1, 2, integers.shape), -127, 127).astype(np.int8)
                scales = scales[None]
            weights[layer.node, precision] = QuantizedWeight(integers, scales, group_size=group_size)
            values[layer] = integers * expand_scales(scales, width, group_size)
    kinds = {layer.node: precision if layer.kind == "MatMul" else "float32" for layer in graph.layers}
    return Plan(kinds, weights=weights), values


def with_weights(graph, values, path):
    """The float graph with other weights, one initializer a layer."""
    model = onnx.load(graph.path)
    nodes = {node.name: node for node in model.graph.node}
    for number, (layer, array) in enumerate(values.items()):
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array, np.float32), f"new{number}"))
        nodes[layer.node].input[1] = f"new{number}"
    onnx.save(model, path)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("precision", "group_size"), [("int8-weight", None), ("int4-weight", 16), ("int4-weight", None)]
)
def test_what_was_decided_is_what_the_engine_multiplies_with(embedder, tmp_path, engine, precision, group_size):
    checkpoint, graph = embedder
    plan, values = adjusted_plan(graph, precision, group_size)
    path, reference = tmp_path / "model.onnx", tmp_path / "reference.onnx"
    place(graph, plan, rules(engine), path)
    onnx.checker.check_model(path)
    with_weights(graph, values, reference)
    batch = inputs(checkpoint, 3, 9)
    with OnnxRuntime().open(reference) as exact, make_runtime(engine).open(path) as session:
        expected, found = exact.run(batch), session.run(batch)
    # Of weights in INT8 ONNX Runtime quantizes the activations too, block by block and unasked.
    slack = 2e-3 if (engine, precision) == ("onnxruntime", "int8-weight") else 2e-5
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=slack)


def test_adjusted_integers_are_written_on_the_scales_of_placement(embedder, tmp_path):
    _, graph = embedder
    plan, _ = adjusted_plan(graph, "int8-weight")
    place(graph, plan, rules("onnxruntime"), tmp_path / "adjusted.onnx")
    place(graph, replace(plan, weights={}), rules("onnxruntime"), tmp_path / "nearest.onnx")
    adjusted, nearest = (read_linear(tmp_path / f"{name}.onnx") for name in ("adjusted", "nearest"))
    assert adjusted.keys() == nearest.keys()
    for name, (integers, scales) in adjusted.items():
        np.testing.assert_array_equal(scales, nearest[name][1])
        assert (integers != nearest[name][0]).any()
        assert (integers == plan.weights[name, "int8-weight"].integers).all()


def read_linear(path):
    """Integers and scales of each weight that is dequantized, by the layer's name."""
    model = onnx.load(path)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {
        node.name.removesuffix("/weight/DQ"): tuple(stored[name] for name in node.input[:2])
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in stored
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("rows", "width"), [(100, 12), (64, 9)])
def test_groups_need_not_fit(tmp_path, engine, rows, width):
    integers = np.random.default_rng(0).integers(-8, 8, (rows, width)).astype(np.int8)
    scales = np.random.default_rng(1).random((-(-rows // 32), width)).astype(np.float32)
    exact = integers * expand_scales(scales, rows, 32)
    graph = one_layer(tmp_path, helper.make_node("MatMul", ["x", "w"], ["y"], "l"), exact)
    plan = Plan({"l": "int4-weight"}, weights={("l", "int4-weight"): QuantizedWeight(integers, scales, group_size=32)})
    place(graph, plan, rules(engine), tmp_path / "placed.onnx")
    x = np.random.default_rng(2).standard_normal((5, rows)).astype(np.float32)
    with make_runtime(engine).open(tmp_path / "placed.onnx") as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], x @ exact, atol=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_takes_four_bits_of_the_file(tmp_path, engine):
    weight = np.random.default_rng(0).standard_normal((1024, 512)).astype(np.float32)
    graph = one_layer(tmp_path, helper.make_node("MatMul", ["x", "w"], ["y"], "l"), weight)
    integers, scales, _ = quantize_in_groups(weight, 128)
    plan = Plan({"l": "int4-weight"}, weights={("l", "int4-weight"): QuantizedWeight(integers, scales, group_size=128)})
    place(graph, plan, rules(engine), tmp_path / "placed.onnx")
    bits = 8 * (tmp_path / "placed.onnx").stat().st_size / weight.size
    assert 4 + 16 / 128 <= bits < 4.3, "and a scale of 16 bits for each 128 weights"


def test_a_weight_in_four_bits_that_the_engine_cannot_read_is_refused_with_the_layers_name(embedder, tmp_path):
    _, graph = embedder
    plan = Plan({x.node: "int4-weight" if x.kind == "MatMul" else "float32" for x in graph.layers})
    with pytest.raises(UnsupportedPrecision, match=r"was to keep its weight in 4 bits.*Try 8 bits"):
        place(graph, plan, replace(rules("openvino"), int4=None), tmp_path / "model.onnx")


def test_an_operator_that_another_opset_means_otherwise_is_refused(tmp_path):
    weight = np.ones((32, 4), np.float32)
    graph = one_layer(tmp_path, helper.make_node("MatMul", ["x", "w"], ["y"], "l"), weight)
    model = onnx.load(graph.path)
    model.graph.node.append(helper.make_node("GroupNormalization", ["y", "s", "s"], ["z"], "norm", num_groups=2))
    onnx.save(model, graph.path)
    with pytest.raises(UnsupportedPrecision, match="opset 21, in which GroupNormalization"):
        place(graph, Plan({"l": "int4-weight"}), rules("openvino"), tmp_path / "placed.onnx")


@pytest.mark.parametrize("bias", [True, False])
def test_bias_correction_goes_into_the_bias_of_a_linear_layer_and_nowhere_without_one(tmp_path, bias):
    weight, correction = np.eye(4, dtype=np.float32), np.arange(4, dtype=np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["product" if bias else "y"], "l")
    graph = one_layer(tmp_path, node, weight, more={"b": np.full(4, 10, np.float32)} if bias else ())
    integers, scales = quantize_weight(weight, 1)
    made = QuantizedWeight(integers, scales[None], correction)
    place(graph, Plan({"l": "int8-weight"}, weights={("l", "int8-weight"): made}), rules("openvino"), tmp_path / "p")
    with OnnxRuntime().open(tmp_path / "p") as session:
        found = session.run({"x": np.zeros((1, 4), np.float32)})["y"]
    np.testing.assert_allclose(found[0], correction + 10 if bias else 0 * correction)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_convolution_without_a_bias_gets_one(tmp_path, engine):
    weight, correction = np.random.default_rng(0).standard_normal((4, 2, 3, 3)).astype(np.float32), np.arange(4.0)
    graph = one_layer(tmp_path, helper.make_node("Conv", ["x", "w"], ["y"], "l"), weight)
    integers, scales = quantize_weight(weight, 0)
    plan = Plan(
        {"l": "int8-weight"},
        weights={("l", "int8-weight"): QuantizedWeight(integers, scales[None], correction.astype(np.float32))},
    )
    place(graph, plan, rules(engine), tmp_path / "placed.onnx")
    with make_runtime(engine).open(tmp_path / "placed.onnx") as session:
        found = session.run({"x": np.zeros((1, 2, 5, 5), np.float32)})["y"]
    np.testing.assert_allclose(found.mean(axis=(0, 2, 3)), correction, atol=1e-5)


def test_gptq_is_the_recursion_of_the_paper_without_blocks():
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(300, 150)) @ generator.normal(size=(150, 150))
    gram = rows.T @ rows / len(rows)
    weight = generator.normal(size=(150, 6)).astype(np.float32)
    steps = np.broadcast_to(np.abs(weight).max(axis=0) / 7, weight.shape).astype(np.float32)
    factor = np.linalg.cholesky(np.linalg.inv(gram + 0.01 * np.diagonal(gram).mean() * np.eye(150))).T
    left, expected = weight.astype(np.float64), np.empty_like(weight)
    for row in range(150):
        expected[row] = np.clip(np.rint(left[row] / steps[row]), -8, 7)
        error = (left[row] - expected[row] * steps[row]) / factor[row, row]
        left[row + 1 :] -= np.outer(factor[row, row + 1 :], error)
    assert (gptq(weight, steps, gram, (-8, 7), order=False) == expected).mean() > 0.999
