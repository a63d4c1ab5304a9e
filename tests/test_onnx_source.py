"""An ONNX file from any framework is adopted with the same answers, or refused with a sentence."""

import models
import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from export.capture.graph_file import count_inner_layers
from export.capture.onnx_source import OnnxHints, import_onnx
from laconic.errors import SourceError
from laconic.runtimes.onnxruntime import OnnxRuntime

RNG = np.random.default_rng(0)


def tensor(name, *shape, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(RNG.standard_normal(shape) * 0.5, dtype), name)


def save(path, nodes, initializers, *, shape=("N", 4), out=("N", None), opset=17, kind=TensorProto.FLOAT, extra=()):
    inputs = [helper.make_tensor_value_info("x", kind, shape), *extra]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", kind, out)], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    model.doc_string = f"made at {path}"
    onnx.save(model, path)
    return path


def linear(path, **options):
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    return save(path, nodes, [tensor("w", 4, 3), tensor("b", 3)], **options)


def answers(path, graph, x):
    with OnnxRuntime().open(path, optimize=False) as before, OnnxRuntime().open(graph.path) as after:
        return before.run({"x": x})["y"], after.run({"x": x})["y"]


def test_a_linear_layer_becomes_a_matmul_of_the_same_answers(tmp_path):
    path = linear(tmp_path / "m.onnx")
    imported = import_onnx(path, tmp_path / "graph")
    graph, task = imported.graph, imported.task
    before, after = answers(path, graph, RNG.standard_normal((5, 4)).astype(np.float32))
    np.testing.assert_allclose(after, before, atol=1e-6)
    assert task.name == "tensors"
    assert graph.inputs[0].shape == ("batch", 4)
    assert graph.outputs[0].shape == ("batch", 3)
    (layer,) = graph.layers
    assert (layer.kind, layer.shape, layer.axis) == ("MatMul", (4, 3), 1)
    assert str(tmp_path).encode() not in graph.path.read_bytes()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    alpha=st.sampled_from([1.0, 0.5, -2.0]),
    beta=st.sampled_from([1.0, 0.0, 3.0]),
    turned=st.booleans(),
    bias=st.sampled_from([None, (), (1,), "out", (1, "out")]),
)
def test_any_gemm_is_split_exactly(tmp_path, sizes, alpha, beta, turned, bias):
    inner, out = sizes
    initializers = [tensor("w", *((out, inner) if turned else (inner, out)))]
    names = ["x", "w"]
    if bias is not None:
        shape = [out if axis == "out" else axis for axis in ([bias] if bias == "out" else bias)]
        initializers.append(tensor("b", *shape))
        names.append("b")
    node = helper.make_node("Gemm", names, ["y"], alpha=alpha, beta=beta, transB=int(turned))
    path = save(tmp_path / "m.onnx", [node], initializers, shape=("N", inner))
    graph = import_onnx(path, tmp_path / "graph").graph
    before, after = answers(path, graph, RNG.standard_normal((3, inner)).astype(np.float32))
    np.testing.assert_allclose(after, before, atol=1e-5)
    assert [layer.kind for layer in graph.layers] == ["MatMul"]
    assert graph.layers[0].shape == (inner, out)


@pytest.mark.parametrize("shared", ["nothing", "weight", "bias", "product", "sum"])
@pytest.mark.parametrize("factor", [0.5, [0.25], [[3.0]]])
def test_a_scale_behind_a_linear_layer_changes_no_other_answer(tmp_path, shared, factor):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["s"]),
        helper.make_node("Mul", ["s", "f"], ["m"]),
        helper.make_node("MatMul", ["x", "w" if shared == "weight" else "v"], ["q"]),
        helper.make_node("Add", ["q", "b" if shared == "bias" else "c"], ["r"]),
        helper.make_node("Sum", ["m", "r", *{"product": ["p"], "sum": ["s"]}.get(shared, [])], ["y"]),
    ]
    constants = [tensor("w", 4, 3), tensor("v", 4, 3), tensor("b", 3), tensor("c", 3)]
    constants.append(numpy_helper.from_array(np.array(factor, np.float32), "f"))
    path = save(tmp_path / "m.onnx", nodes, constants)
    graph = import_onnx(path, tmp_path / "graph").graph
    before, after = answers(path, graph, RNG.standard_normal((5, 4)).astype(np.float32))
    np.testing.assert_allclose(after, before, atol=1e-5)
    assert graph.layers[0].node == "MatMul"


def test_batch_normalisation_is_folded_into_the_convolution(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    variance = numpy_helper.from_array(np.array([0.5, 1.5, 2.0], np.float32), "v")
    initializers = [tensor("w", 3, 2, 3, 3), *(tensor(name, 3) for name in "sbm"), variance]
    path = save(tmp_path / "m.onnx", nodes, initializers, shape=("N", 2, "H", "W"), out=("N", 3, None, None))
    graph = import_onnx(path, tmp_path / "graph").graph
    assert [node.op_type for node in onnx.load(graph.path).graph.node] == ["Conv", "Relu"]
    assert graph.inputs[0].shape == ("batch", 2, "H", "W")
    assert graph.outputs[0].shape == ("batch", 3, "H", "W")
    before, after = answers(path, graph, RNG.standard_normal((2, 2, 7, 5)).astype(np.float32))
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_an_image_classifier_is_adopted_when_asked_for(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    path = save(tmp_path / "m.onnx", nodes, [tensor("w", 5, 3, 3, 3)], shape=("N", 3, 8, 8))
    task = import_onnx(path, tmp_path / "graph", "image-classification").task
    assert task.preprocess.resize == (8, 8)
    with pytest.raises(SourceError, match="tokenizer"):
        import_onnx(path, tmp_path / "graph", "text-classification")


def test_an_old_opset_is_raised_and_initializers_among_the_inputs_are_no_inputs(tmp_path):
    for opset, expected in ((9, 13), (13, 13), (17, 17), (21, 21)):
        path = linear(tmp_path / f"{opset}.onnx", opset=opset)
        graph = import_onnx(path, tmp_path / f"graph{opset}").graph
        assert onnx.load(graph.path).opset_import[0].version == expected
    extra = [helper.make_tensor_value_info("w", TensorProto.FLOAT, (4, 3))]
    path = linear(tmp_path / "m.onnx", extra=extra)
    graph = import_onnx(path, tmp_path / "graph").graph
    assert [spec.name for spec in graph.inputs] == ["x"]


def test_free_axes_are_named_and_unnamed_ones_shared_unless_they_differ(tmp_path):
    nodes = [
        helper.make_node("Add", ["x", "z"], ["s"]),
        helper.make_node("MatMul", ["s", "w"], ["y"]),
    ]
    extra = [helper.make_tensor_value_info("z", TensorProto.FLOAT, (None, None, 4))]
    path = save(
        tmp_path / "m.onnx", nodes, [tensor("w", 4, 2)], shape=(None, None, 4), out=(None, None, 2), extra=extra
    )
    graph = import_onnx(path, tmp_path / "graph").graph
    assert [spec.shape for spec in graph.inputs] == [("batch", "axis_1", 4)] * 2
    assert graph.outputs[0].shape == ("batch", "axis_1", 2)
    nodes = [
        helper.make_node("Concat", ["x", "z"], ["s"], axis=1),
        helper.make_node("Slice", ["z", "one", "two", "one"], ["t"]),
        helper.make_node("Sub", ["x", "t"], ["d"]),
        helper.make_node("Concat", ["s", "d"], ["y"], axis=1),
    ]
    constants = [numpy_helper.from_array(np.array([value]), name) for name, value in (("one", 1), ("two", 2**40))]
    extra = [helper.make_tensor_value_info("z", TensorProto.FLOAT, (None, None, 4))]
    path = save(tmp_path / "m.onnx", nodes, constants, shape=(None, None, 4), out=("N", "M", 4), extra=extra)
    # z must be one longer than x: no sizes of ours fit, and the file does not say so.
    with pytest.raises(SourceError, match="Give --data"):
        import_onnx(path, tmp_path / "graph")


def test_equal_weights_are_kept_once_and_shared_ones_stay_right(tmp_path):
    shared = tensor("w", 4, 4)
    twin = numpy_helper.from_array(numpy_helper.to_array(shared), "twin")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["a", "twin"], ["b"]),
        helper.make_node("Gemm", ["b", "w"], ["y"], transB=1),
    ]
    path = save(tmp_path / "m.onnx", nodes, [shared, twin])
    graph = import_onnx(path, tmp_path / "graph").graph
    before, after = answers(path, graph, RNG.standard_normal((3, 4)).astype(np.float32))
    np.testing.assert_allclose(after, before, atol=1e-6)
    assert len(onnx.load(graph.path).graph.initializer) == 2
    assert len({layer.node for layer in graph.layers}) == 3


def test_external_data_is_brought_in(tmp_path):
    path = linear(tmp_path / "m.onnx")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    graph = import_onnx(path, tmp_path / "graph").graph
    assert sorted(file.name for file in (tmp_path / "graph").iterdir()) == ["model.onnx"]
    assert len(graph.layers) == 1
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(SourceError):
        import_onnx(path, tmp_path / "graph")


@pytest.mark.parametrize("content", [b"", b"not a graph", None])
def test_a_damaged_file_is_refused(tmp_path, content):
    path = linear(tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:-40] if content is None else content)
    with pytest.raises(SourceError, match="is not a valid ONNX file"):
        import_onnx(path, tmp_path / "graph")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SourceError, match="missing"):
        import_onnx(tmp_path / "nothing.onnx", tmp_path / "graph")


def test_a_batch_of_one_is_freed_where_rows_do_not_meet(tmp_path):
    path = linear(tmp_path / "m.onnx", shape=(1, 4), out=(1, 3))
    graph = import_onnx(path, tmp_path / "graph").graph
    assert graph.inputs[0].shape == ("batch", 4)
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    with OnnxRuntime().open(path) as single, OnnxRuntime().open(graph.path) as free:
        rows = [single.run({"x": x[[row]]})["y"][0] for row in range(3)]
        np.testing.assert_allclose(free.run({"x": x})["y"], rows, atol=1e-6)


@pytest.mark.parametrize(
    ("node", "out"),
    [
        (helper.make_node("ReduceSum", ["x", "axis"], ["y"], keepdims=0), (4,)),
        (helper.make_node("Softmax", ["x"], ["y"], axis=0), (1, 4)),
        (helper.make_node("Reshape", ["x", "four"], ["y"]), (1, 4)),
    ],
)
def test_a_batch_of_one_is_run_row_by_row_where_rows_meet(tmp_path, node, out):
    constants = [numpy_helper.from_array(np.array([0]), "axis"), numpy_helper.from_array(np.array([1, 4]), "four")]
    path = save(tmp_path / "m.onnx", [node], constants, shape=(1, 4), out=out)
    imported = import_onnx(path, tmp_path / "graph")
    assert imported.graph.inputs[0].shape == ("batch", 4)
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    with OnnxRuntime().open(path) as single, OnnxRuntime().open(imported.graph.path) as several:
        rows = [single.run({"x": x[[row]]})["y"].reshape(1, 4) for row in range(3)]
        np.testing.assert_allclose(several.run({"x": x})["y"], np.concatenate(rows), atol=1e-6)


def test_a_larger_fixed_batch_is_refused(tmp_path):
    with pytest.raises(SourceError, match="dynamic batch"):
        import_onnx(linear(tmp_path / "m.onnx", shape=(2, 4), out=(2, 3)), tmp_path / "graph")


def test_half_precision_is_read_as_float32(tmp_path):
    half = [tensor("w", 4, 3, dtype=np.float16)]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = save(tmp_path / "m.onnx", [node], half, kind=TensorProto.FLOAT16)
    imported = import_onnx(path, tmp_path / "graph")
    assert imported.graph.inputs[0].dtype == "float32"
    assert any("half precision" in note for note in imported.interface.notes)
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    with OnnxRuntime().open(imported.file) as half, OnnxRuntime().open(imported.graph.path) as graph:
        np.testing.assert_allclose(graph.run({"x": x})["y"], half.run({"x": x})["y"], atol=5e-3)


def test_a_quantized_model_is_taken_as_it_is_and_not_quantized_again(tmp_path):
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    constants = [numpy_helper.from_array(np.array(0.1, np.float32), "s"), numpy_helper.from_array(np.uint8(3), "z")]
    path = save(tmp_path / "m.onnx", nodes, constants)
    with pytest.raises(SourceError, match=r"QuantizeLinear.*laconic export"):
        import_onnx(path, tmp_path / "refused", hints=OnnxHints(quantizes=True))
    graph = import_onnx(path, tmp_path / "graph").graph
    before, after = answers(path, graph, RNG.standard_normal((3, 4)).astype(np.float32))
    np.testing.assert_array_equal(after, before)
    assert [node.op_type for node in onnx.load(graph.path).graph.node] == ["QuantizeLinear", "DequantizeLinear"]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:Exporting a model to ONNX with a batch_size",
    "ignore::torch.jit.TracerWarning",
)
def test_what_the_old_exporter_of_torch_writes_is_adopted(tmp_path):
    module = models.randomize(models.BiLstm())
    path = tmp_path / "m.onnx"
    options = {"input_names": ["x"], "dynamic_axes": {"x": {0: "rows", 1: "steps"}}, "opset_version": 11}
    torch.onnx.export(module, (torch.randn(2, 5, 6),), path, dynamo=False, **options)
    graph = import_onnx(path, tmp_path / "graph").graph
    assert graph.inputs[0].shape == ("batch", "steps", 6)
    x = RNG.standard_normal((3, 9, 6)).astype(np.float32)
    with OnnxRuntime().open(graph.path) as session, torch.no_grad():
        (found,) = session.run({"x": x}).values()
        np.testing.assert_allclose(found, module(torch.from_numpy(x)).numpy(), atol=1e-5)


def test_layers_in_bodies_are_counted_by_whether_their_weights_are_reached():
    value = helper.make_tensor_value_info("p", TensorProto.FLOAT, None)
    first, second = (helper.make_graph([helper.make_node("MatMul", ["x", w], ["p"])], w, [], [value]) for w in "ab")
    inner = helper.make_node("If", ["c"], ["p"], then_branch=first, else_branch=second)
    branch = helper.make_node(
        "If", ["c"], ["z"], then_branch=first, else_branch=helper.make_graph([inner], "i", [], [value])
    )
    graph = helper.make_graph([branch], "g", [], [], [tensor("a", 4, 3), tensor("b", 4, 3)])
    assert count_inner_layers(graph, {"a"}) == {("If", True): 2, ("If", False): 1}
