"""Attention as MultiHeadAttention: which graphs get it, and that they compute the same."""

from dataclasses import replace

import captured
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from export.candidates.engine_option import EngineOption
from export.passes.fused_attention import fuse_attention, infer_shapes
from export.passes.rewrite import GraphRewriter
from export.placements.place import place
from laconic import registry
from laconic.errors import RuntimeFailure
from laconic.metrics import cosine
from laconic.quantization.plan import Plan
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import make_runtime

FUSED = captured.mark_swept("bert", "distilbert", "roberta", "embedder", "vit")
NOT_FUSED = ["gpt2", "llama", "t5-encoder"]
"""Masks that differ between queries, rotated queries and keys, and a bias for each pair of positions."""


def place_float(graph, path):
    """Place a graph for ONNX Runtime without quantization; returns its operators by kind."""
    plan = Plan({layer.node: "float32" for layer in graph.layers})
    EngineOption("onnxruntime", "float32").build(graph, plan, path)
    return [node for node in onnx.load(path).graph.node if node.op_type == "MultiHeadAttention"]


def masked(checkpoint, rows, length):
    """Inputs of the model, the last half of the first row being padding."""
    given = captured.inputs(checkpoint, rows, length)
    if "attention_mask" in given:
        given["attention_mask"] = np.ones_like(given["attention_mask"])
        given["attention_mask"][0, length // 2 :] = 0
    return given


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5 * np.abs(array).max(), rtol=0)


@pytest.mark.parametrize("name", FUSED)
def test_fused_attention_computes_the_same_with_and_without_padding(name, shared, tmp_path):
    checkpoint, graph = captured.open_captured(shared, name)
    assert place_float(graph, tmp_path / "fused.onnx")
    with (
        OnnxRuntime().open(tmp_path / "fused.onnx") as session,
        OnnxRuntime().open(graph.path, optimize=False) as reference,
    ):
        for rows, length in ((1, 1), (1, 7), (3, 16)):
            given = masked(checkpoint, rows, length)
            close(session.run(given), reference.run(given))


def test_openvino_refuses_it_and_says_how_to_get_a_graph_of_its_own(shared, tmp_path):
    _, graph = captured.open_captured(shared, "bert")
    place_float(graph, tmp_path / "fused.onnx")
    with pytest.raises(RuntimeFailure, match=r"attention as one operator.*laconic build --engine-only openvino"):
        make_runtime("openvino").open(tmp_path / "fused.onnx")


@pytest.mark.parametrize("name", [*FUSED, *NOT_FUSED])
def test_a_graph_placed_for_openvino_is_right_after_an_input_of_length_1(name, shared, tmp_path):
    checkpoint, graph = captured.open_captured(shared, name)
    plan = Plan({layer.node: "float32" for layer in graph.layers})
    EngineOption("openvino", "float32").build(graph, plan, tmp_path / "model.onnx")
    with (
        make_runtime("openvino").open(tmp_path / "model.onnx") as session,
        OnnxRuntime().open(graph.path, optimize=False) as reference,
    ):
        for rows, length in ((1, 1), (1, 16), (2, 1), (3, 16)):
            given = masked(checkpoint, rows, length)
            close(session.run(given), reference.run(given))


@pytest.mark.parametrize("name", FUSED)
def test_attention_is_fused_in_quantized_graphs_as_well(name, zoo, tmp_path):
    checkpoint, graph, ranges = zoo(name)
    layers = {layer.node: "int8-weight" if layer.kind == "Gather" else "int8" for layer in graph.layers}
    given = masked(checkpoint, 3, 9)
    found = {}
    for fused in (True, False):
        rules = replace(registry.resolve("placement", "onnxruntime")["float32"], fused_attention=fused)
        path = tmp_path / f"{fused}.onnx"
        place(graph, Plan(layers, ranges), rules, path)
        assert bool(count_fused(onnx.load(path))) == fused
        with OnnxRuntime().open(path, optimize=False) as session:
            found[fused] = session.run(given)
    for output, array in found[False].items():
        assert cosine(array, found[True][output]).min() > 0.999  # a value between two integers may go to either


@pytest.mark.parametrize("name", NOT_FUSED)
def test_other_attention_is_left_as_it_is(name, shared, tmp_path):
    _, graph = captured.open_captured(shared, name)
    assert not place_float(graph, tmp_path / "model.onnx")


def test_both_products_are_audited_as_the_kernel_that_computes_them(shared, tmp_path):
    checkpoint, graph = captured.open_captured(shared, "bert")
    (fused, *_) = place_float(graph, tmp_path / "model.onnx")
    with OnnxRuntime().open(tmp_path / "model.onnx") as session:
        session.run(masked(checkpoint, 1, 8))
        kernels = {kernel.node: kernel for kernel in session.kernels()}
    names = {node.name for node in onnx.load(graph.path).graph.node if node.op_type == "MatMul"}
    for name in fused.name.split("+"):
        assert name in names
        assert (kernels[name].kind, kernels[name].precision) == ("MultiHeadAttention", "float32")


def attention_graph(factor, *, mask, heads=2, width=4, also=""):
    """Attention of an input with itself. factor: of the queries. mask: its shape, without the batch if that is free.
    also: a second output."""
    size = heads * width
    nodes = [
        helper.make_node("MatMul", ["x", f"w{part}"], [f"{part}"], f"{part}") for part in ("query", "key", "value")
    ]
    nodes += [
        helper.make_node("Reshape", [part, "split"], [f"{part}4"], f"{part}4") for part in ("query", "key", "value")
    ]
    nodes += [
        helper.make_node("Transpose", ["query4"], ["q"], "q", perm=[0, 2, 1, 3]),
        helper.make_node("Mul", ["q", "factor"], ["scaled"], "scaled"),
        helper.make_node("Transpose", ["key4"], ["k"], "k", perm=[0, 2, 3, 1]),
        helper.make_node("Transpose", ["value4"], ["v"], "v", perm=[0, 2, 1, 3]),
        helper.make_node("MatMul", ["scaled", "k"], ["scores"], "scores"),
    ]
    last = "scores"
    if mask is not None:
        nodes.append(helper.make_node("Add", ["scores", "mask"], ["added"], "added"))
        last = "added"
    nodes += [
        helper.make_node("Softmax", [last], ["shares"], "shares", axis=-1),
        helper.make_node("MatMul", ["shares", "v"], ["values"], "values"),
        helper.make_node("Transpose", ["values"], ["turned"], "turned", perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["turned", "merge"], ["y"], "y"),
    ]
    info = helper.make_tensor_value_info
    inputs = [info("x", 1, ["batch", "seq", size])]
    if mask is not None:
        inputs.append(info("mask", 1, ["batch", *mask] if len(mask) == 3 else mask))
    outputs = [info(name, 1, None) for name in ("y", also) if name]
    rng = np.random.default_rng(0)
    constants = {
        **{f"w{part}": rng.standard_normal((size, size)).astype(np.float32) for part in ("query", "key", "value")},
        "factor": np.float32(factor),
        "split": np.array([0, 0, heads, width], np.int64),
        "merge": np.array([0, 0, size], np.int64),
    }
    stored = [numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items()]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def count_fused(model):
    return sum(node.op_type == "MultiHeadAttention" for node in model.graph.node)


def fuse(model):
    rewrite = GraphRewriter(model)
    fuse_attention(rewrite, infer_shapes(model))
    return rewrite.finish()


@pytest.mark.parametrize("mask", [None, (1, 1, "seq")])
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_a_factor_of_the_queries_becomes_the_scale_and_leaves_the_mask_as_it_is(factor, mask, tmp_path):
    onnx.save(attention_graph(factor, mask=mask), tmp_path / "plain.onnx")
    fused = fuse(attention_graph(factor, mask=mask))
    assert count_fused(fused) == 1
    onnx.save(fused, tmp_path / "fused.onnx")
    rng = np.random.default_rng(1)
    given = {"x": rng.standard_normal((3, 5, 8)).astype(np.float32)}
    if mask is not None:
        given["mask"] = np.where(rng.random((3, 1, 1, 5)) < 0.5, rng.standard_normal((3, 1, 1, 5)), -1e4)
        given["mask"] = given["mask"].astype(np.float32)
        given["mask"][..., 0] = 0  # where no key is left, rounding decides
    with (
        OnnxRuntime().open(tmp_path / "plain.onnx", optimize=False) as plain,
        OnnxRuntime().open(tmp_path / "fused.onnx") as session,
    ):
        close(session.run(given), plain.run(given))


@pytest.mark.parametrize("hidden", [-np.inf, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_the_lowest_number_and_infinity_hide_whole_blocks_of_keys(factor, hidden, tmp_path):
    onnx.save(attention_graph(factor, mask=(1, 1, "seq")), tmp_path / "plain.onnx")
    onnx.save(fuse(attention_graph(factor, mask=(1, 1, "seq"))), tmp_path / "fused.onnx")
    given = {
        "x": np.random.default_rng(2).standard_normal((2, 700, 8)).astype(np.float32),
        "mask": np.full((2, 1, 1, 700), hidden, np.float32),
    }
    given["mask"][0, ..., 650:] = given["mask"][1, ..., :3] = 0
    with (
        OnnxRuntime().open(tmp_path / "plain.onnx", optimize=False) as plain,
        OnnxRuntime().open(tmp_path / "fused.onnx") as session,
    ):
        close(session.run(given), plain.run(given))


@pytest.mark.parametrize("mask", [(1, "seq", "seq"), (2, 1, "seq"), (1, 1, 1), (1, 1, 1, "seq")])
def test_a_mask_that_differs_between_queries_or_heads_or_that_all_samples_or_keys_share_is_not_fused(mask):
    assert not count_fused(fuse(attention_graph(1.0, mask=mask)))


@pytest.mark.parametrize("tensor", ["scores", "shares", "k", "scaled", "values"])
def test_a_tensor_of_attention_that_is_an_output_is_kept(tensor):
    fused = fuse(attention_graph(1.0, mask=None, also=tensor))
    assert not count_fused(fused)
    assert tensor in {name for node in fused.graph.node for name in node.output}
