"""Weights whose groups of inputs have scales and zeros: what engines multiply with, what is stored, and what is read
back; embeddings and heads that share them."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compress.quantize.awq_scales import OUTPUTS, find_scales, measure_error
from compress.quantize.plan_rounding import RoundingConfig, round_layers
from compress.quantize.weight_only import Weights, find_precisions
from export.passes.grouped_weights import BLOCKS, read_grouped_weight
from export.placements.place import place
from export.placements.rules import keep_compressed
from laconic import registry
from laconic.cache import Cache
from laconic.progress import Steps
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, Smoothing
from laconic.quantization.qparams import INT8_LEVELS, expand_scales, fit_grid, quantize_in_groups
from laconic.recipes.stage import PlanContext
from laconic.runtimes.runtime import make_runtime
from laconic.tensor import TensorSpec

ENGINES = ("onnxruntime", "openvino")
ROWS, WIDTH = 50, 40
IDS = TensorSpec(name="ids", dtype="int64", shape=("batch", "seq"))


def make_graph(folder, table, head):
    """The graph of an embedding and a linear layer behind it."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], "table/Gather", axis=0),
        helper.make_node("MatMul", ["rows", "head"], ["y"], "head/MatMul"),
    ]
    ends = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "seq"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "seq", head.shape[1]]),
    ]
    weights = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.ascontiguousarray(head), "head")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], weights),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    path = folder / "float.onnx"
    onnx.save(model, path)
    layers = (
        Layer("table/Gather", "table", "Gather", "ids", "table", "rows", table.shape, 0),
        Layer("head/MatMul", "head", "MatMul", "rows", "head", "y", head.shape, 1),
    )
    return Graph(path, (IDS,), (IDS,), layers, "key")


@pytest.fixture
def table():
    rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH)) + np.linspace(-1, 1, WIDTH)
    return rows.astype(np.float32)


def round_graph(graph, bits, config, embedding_bits=8):
    plan = Plan(find_precisions(graph, bits, (), embedding_bits))
    rounded = round_layers(graph, graph.layers, plan, [config], [], None)
    return replace(plan, weights={(layer.node, plan.precision[layer.node]): each for layer, (each,) in rounded})


def restore(layer, weight):
    """The float weight that the integers stand for."""
    integers = weight.integers.T if layer.kind == "Gather" else weight.integers
    shifts = 0 if weight.zeros is None else expand_scales(weight.zeros, len(integers), weight.group_size)
    whole = (integers - shifts) * expand_scales(weight.scales, len(integers), weight.group_size)
    return whole.T if layer.kind == "Gather" else whole


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_language", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "embedding_bits"), [(4, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize("size", [16, 32])
def test_engines_multiply_with_what_was_rounded(
    tmp_path, table, engine, is_language, symmetric, bits, embedding_bits, size
):
    head = np.random.default_rng(1).standard_normal((WIDTH, 24)).astype(np.float32)
    graph = make_graph(tmp_path, table, head)
    config = RoundingConfig(group_size=size, int8_group_size=size, symmetric=symmetric)
    plan = round_graph(graph, bits, config, embedding_bits)
    rules = registry.resolve("placement", engine)["float32"]
    place(graph, plan, keep_compressed(rules) if is_language else rules, tmp_path / "placed.onnx")
    onnx.checker.check_model(tmp_path / "placed.onnx")
    rows, columns = (restore(layer, plan.weights[layer.node, plan.precision[layer.node]]) for layer in graph.layers)
    assert np.abs(rows - table).max() < (0.02 if embedding_bits == 8 else 0.4)
    ids = np.random.default_rng(2).integers(0, ROWS, (3, 7))
    with make_runtime(engine).open(tmp_path / "placed.onnx") as session:
        np.testing.assert_allclose(session.run({"ids": ids})["y"], rows[ids] @ columns, atol=1e-4)
    operators = {node.op_type for node in onnx.load(tmp_path / "placed.onnx").graph.node}
    slow = engine == "onnxruntime" and bits == 8
    assert (BLOCKS in operators) == ((is_language and not slow) or (engine == "onnxruntime" and not slow))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "embedding_bits"), [(4, 4), (4, 8), (8, 8)])
def test_a_head_that_is_the_embedding_is_stored_once(tmp_path, table, symmetric, bits, embedding_bits):
    graph = make_graph(tmp_path, table, table.T)
    config = RoundingConfig(group_size=32, int8_group_size=32, symmetric=symmetric)
    plan = round_graph(graph, bits, config, embedding_bits)
    (precision,) = set(plan.precision.values())
    assert precision == f"int{embedding_bits}-weight"
    rules = keep_compressed(registry.resolve("placement", "openvino")["float32"])
    place(graph, plan, rules, tmp_path / "placed.onnx")
    stored = onnx.load(tmp_path / "placed.onnx").graph.initializer
    assert sum(tensor.data_type == TensorProto.UINT8 and len(tensor.dims) == 3 for tensor in stored) == 1
    rows = restore(graph.layers[0], plan.weights["table/Gather", precision])
    ids = np.arange(ROWS)[None]
    with make_runtime("openvino").open(tmp_path / "placed.onnx") as session:
        np.testing.assert_allclose(session.run({"ids": ids})["y"], rows[ids] @ rows.T, atol=1e-4)


def test_a_head_in_4_bits_is_raised_with_its_embedding_and_both_are_stored_once(tmp_path, table):
    graph = make_graph(tmp_path, table, table.T)
    context = PlanContext(
        task=None, key="", seed=0, folder=tmp_path, cache=Cache(tmp_path / "cache"), steps=Steps(quiet=True),
        train=None, calibrate=None, choose=None, trial=lambda plan: np.ones(1),
    )  # fmt: skip
    stage = Weights(bits=4, embedding_bits=4, group_size=32, symmetric=False, mixed_precision=True)
    plans = [plan for rung in stage.plan(graph, context).rungs for plan in rung]
    precisions = [set(plan.precision.values()) for plan in plans]
    assert [len(each) for each in precisions] == [1] * len(plans)
    assert list(dict.fromkeys(each for (each,) in precisions)) == [
        "int4-weight", "int8-weight", "float16-weight", "float32",
    ]  # fmt: skip
    sizes = []
    for plan in plans[:2]:
        place(graph, plan, keep_compressed(registry.resolve("placement", "openvino")["float32"]), tmp_path / "placed")
        stored = onnx.load(tmp_path / "placed").graph.initializer
        (weight,) = (each for each in stored if each.data_type == TensorProto.UINT8 and len(each.dims) == 3)
        sizes.append(weight.dims[2])
    assert sizes == [16, 32], "bytes of a group"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_language", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "embedding_bits"), [(4, 4), (4, 8), (8, 8)])
def test_groups_are_read_back_as_they_were_rounded(
    tmp_path, table, engine, is_language, symmetric, bits, embedding_bits
):
    head = np.random.default_rng(1).standard_normal((WIDTH, 24)).astype(np.float32)
    for last in (head, table.T):
        graph = make_graph(tmp_path, table, last)
        config = RoundingConfig(group_size=16, int8_group_size=16, symmetric=symmetric)
        plan = round_graph(graph, bits, config, embedding_bits)
        rules = registry.resolve("placement", engine)["float32"]
        place(graph, plan, keep_compressed(rules) if is_language else rules, tmp_path / "placed.onnx")
        model = onnx.load(tmp_path / "placed.onnx").graph
        nodes, tensors = {node.name: node for node in model.node}, {each.name: each for each in model.initializer}
        for layer in graph.layers:
            expected, weight = (
                plan.weights[layer.node, plan.precision[layer.node]],
                read_grouped_weight(layer, nodes, tensors),
            )
            assert weight is not None
            assert weight.group_size == expected.group_size
            assert weight.arrays.keys() == expected.arrays.keys()
            np.testing.assert_array_equal(weight.integers, expected.integers)
            np.testing.assert_array_equal(weight.scales, expected.scales)
            if expected.zeros is not None:
                np.testing.assert_allclose(weight.zeros, expected.zeros, atol=1e-5)


@pytest.mark.parametrize("compute", ["float32", "int8-dynamic"])
def test_zeros_that_are_no_levels_are_multiplied_with_and_read_back_exactly(tmp_path, table, compute):
    """The width is no multiple of the group, and the weight lies on a grid, which the exact integers show."""
    rng = np.random.default_rng(3)
    scales, lowest = rng.uniform(0.5, 1, (3, 24)), -rng.uniform(1, 9, (3, 24))
    places = rng.integers(0, 16, (3, 16, 24))
    places[:, 0], places[:, 1] = 0, 15
    head = (places * scales[:, None].astype(np.float16) + lowest[:, None]).reshape(48, 24).astype(np.float32)[:WIDTH]
    graph = make_graph(tmp_path, table, head)
    plan = round_graph(graph, 4, RoundingConfig(group_size=16, int8_group_size=16, symmetric=False))
    table_layer, head_layer = graph.layers
    weight = plan.weights["head/MatMul", "int4-weight"]
    assert np.abs(weight.zeros - np.rint(weight.zeros)).max() > 0.3
    np.testing.assert_allclose(restore(head_layer, weight), head, atol=0.01)
    place(graph, plan, keep_compressed(registry.resolve("placement", "openvino")[compute]), tmp_path / "placed.onnx")
    model = onnx.load(tmp_path / "placed.onnx").graph
    nodes, tensors = {node.name: node for node in model.node}, {each.name: each for each in model.initializer}
    np.testing.assert_array_equal(read_grouped_weight(head_layer, nodes, tensors).zeros, weight.zeros)
    ids = rng.integers(0, ROWS, (3, 7))
    expected = restore(table_layer, plan.weights["table/Gather", "int8-weight"])[ids] @ restore(head_layer, weight)
    with make_runtime("openvino").open(tmp_path / "placed.onnx", compute=compute) as session:
        error = np.abs(session.run({"ids": ids})["y"] - expected).max() / np.abs(expected).max()
    assert error < (1e-5 if compute == "float32" else 0.02)


@given(st.integers(1, 70), st.integers(1, 5), st.sampled_from([16, 32, None]), st.booleans(), st.integers(0, 99))
@settings(max_examples=60)
def test_no_weight_is_farther_off_than_half_a_step(rows, width, size, symmetric, seed):
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((rows, width)) * 10.0 ** rng.integers(-9, 4) + rng.integers(-2, 3)).astype(np.float32)
    weight[:, :1] *= rng.integers(0, 2)
    integers, scales, zeros = quantize_in_groups(weight, size, INT8_LEVELS, symmetric)
    steps = expand_scales(scales, rows, size)
    shifts = 0 if zeros is None else expand_scales(zeros, rows, size)
    # Where a group's numbers are nearly the same, zeros are large, and single precision rounds them.
    slack = 0.51 + 0.01 + np.abs(shifts) * 2e-6
    assert (np.abs((integers - shifts) * steps - weight) <= steps * slack + np.abs(weight) * 1e-3).all()


def make_grid_weight():
    """Weights as those of a checkpoint in GGUF's Q4_1: 16 numbers from a minimum on, in groups of 32; [64, 6]."""
    rng = np.random.default_rng(0)
    scales = (rng.random((2, 6)) + 0.5).astype(np.float16).astype(np.float32)
    lowest = -rng.random((2, 6)).astype(np.float16).astype(np.float32) * 9
    places = rng.integers(0, 16, (2, 32, 6))
    places[:, 0], places[:, 1] = 0, 15
    return (places * scales[:, None] + lowest[:, None]).reshape(64, 6).astype(np.float32)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("embedding_bits", [4, 8])
def test_weights_that_lie_on_a_grid_with_zeros_are_kept_exactly(tmp_path, size, embedding_bits):
    """Also those of a head that is the embedding, and where larger groups were asked for; and by GPTQ, which gets no
    samples: it needs none for these."""
    weight = make_grid_weight()
    other = np.random.default_rng(1).standard_normal((ROWS, 64)).astype(np.float32)
    for table, head in ((other, weight), (weight.T, weight)):
        graph = make_graph(tmp_path, np.ascontiguousarray(table), head)
        errors = []
        for symmetric in (False, True):
            config = RoundingConfig(group_size=size, int8_group_size=size, symmetric=symmetric)
            plan = round_graph(graph, 4, config, embedding_bits)
            layer = graph.layers[1]
            errors.append(np.abs(restore(layer, plan.weights[layer.node, plan.precision[layer.node]]) - head).max())
            if not symmetric:
                again = round_graph(graph, 4, replace(config, rounding="gptq"), embedding_bits)
                for key, each in plan.weights.items():
                    for name, array in each.arrays.items():
                        np.testing.assert_array_equal(again.weights[key].arrays[name], array)
        if plan.precision["head/MatMul"] == "int4-weight":
            assert errors[0] < 1e-5
            assert errors[1] > 0.1


def test_scales_are_numbers_of_fp16_unless_it_would_lose_digits():
    weight = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32) * np.float32([1, 1e-6, 1e9])
    scales, _ = fit_grid(weight, 32)
    is_half = scales == scales.clip(max=60_000).astype(np.float16).astype(np.float32)
    assert is_half[:, 0].all()
    assert (scales[:, 1:] > 0).all()
    assert not is_half[:, 1:].any()


def make_gained_graph(folder, gain, weights):
    """The graph of a product with weights of each channel, as at the end of RMSNorm, and of linear layers behind it."""
    nodes = [helper.make_node("Mul", ["x", "gain"], ["normed"], "norm/Mul")]
    layers, outputs = [], []
    for number, weight in enumerate(weights):
        name, output = f"layer{number}/MatMul", f"y{number}"
        nodes.append(helper.make_node("MatMul", ["normed", f"w{number}"], [output], name))
        layers.append(Layer(name, f"layer{number}", "MatMul", "normed", f"w{number}", output, weight.shape, 1))
        outputs.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", weight.shape[1]]))
    arrays = {"gain": gain, **{f"w{number}": weight for number, weight in enumerate(weights)}}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", len(gain)])],
        outputs,
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    path = folder / "float.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", len(gain)))
    return Graph(path, (spec,), (spec,), tuple(layers), "key")


def test_awq_scales_inputs_with_large_activations_up():
    rng = np.random.default_rng(0)
    sizes = np.ones(64)
    sizes[::8] = 30
    rows = (rng.standard_normal((500, 64)) * sizes).astype(np.float32)
    gram = rows.T.astype(np.float64) @ rows / len(rows)
    weights = [rng.standard_normal((64, width)).astype(np.float32) for width in (24, 40)]
    config = RoundingConfig(group_size=32)
    factors = find_scales(weights, gram, config)
    assert factors[::8].min() > factors[sizes == 1].max()
    plain, scaled = (
        sum(measure_error(weight, each, gram, config) for weight in weights) for each in (np.ones(64), factors)
    )
    assert scaled < 0.7 * plain
    assert find_scales(weights, np.eye(64), config) is None, "where all are alike, nothing is scaled"
    wide = rng.standard_normal((64, 3 * OUTPUTS)).astype(np.float32)
    found = find_scales([wide], gram, config)
    assert (found == find_scales([wide[:, ::3]], gram, config)).all(), "a third of the outputs is measured"
    assert measure_error(wide, found, gram, config) < 0.7 * measure_error(wide, np.ones(64), gram, config)


@pytest.mark.parametrize("engine", ENGINES)
def test_scaled_inputs_are_divided_again_and_cost_no_node_behind_a_norm(tmp_path, engine):
    rng = np.random.default_rng(0)
    gain, factors = (rng.random(64).astype(np.float32) + 0.5 for _ in range(2))
    weights = [rng.standard_normal((64, width)).astype(np.float32) for width in (24, 40)]
    graph = make_gained_graph(tmp_path, gain, weights)
    plan = Plan({layer.node: "int4-weight" for layer in graph.layers}, smoothing={"normed": Smoothing(factors)})
    config = RoundingConfig(group_size=32)
    rounded = {
        (layer.node, "int4-weight"): each
        for layer, (each,) in round_layers(graph, graph.layers, plan, [config], [], None)
    }
    place(
        graph,
        replace(plan, weights=rounded),
        registry.resolve("placement", engine)["float32"],
        tmp_path / "placed.onnx",
    )
    products = [node for node in onnx.load(tmp_path / "placed.onnx").graph.node if node.name.endswith("normalize")]
    assert len(products) == 1
    x = rng.standard_normal((5, 64)).astype(np.float32)
    with make_runtime(engine).open(tmp_path / "placed.onnx") as session:
        outputs = session.run({"x": x})
    for layer in graph.layers:
        weight = restore(layer, rounded[layer.node, "int4-weight"]) / factors[:, None]
        np.testing.assert_allclose(outputs[layer.output], (x * gain) @ weight, atol=1e-4)
