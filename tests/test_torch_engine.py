"""PyTorch as an engine: graphs of Laconic, translated, in FP32 and BF16, and what it refuses."""

import os
import subprocess
import sys

import captured
import numpy as np
import onnx
import pytest
import torch
import torch._inductor.config as inductor
from onnx import TensorProto, helper, numpy_helper

from export.build import EngineOption
from laconic.errors import MissingPackage, RecipeError, RuntimeFailure
from laconic.quantization.plan import Plan
from laconic.recipes.recipe import Recipe
from laconic.registry import ENGINES_ON_REQUEST, TARGETS, resolve
from laconic.runtimes.fallbacks import find_reason
from laconic.runtimes.inductor_kernels import find_kernels, parse_calls
from laconic.runtimes.onnx_graph import read_graph
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import Kernel
from laconic.runtimes.torch_engine import BF16, FROZEN, Torch

MODELS = ["bert", "gpt2", "residual", "mobilenet", "tied"]


def compare(model, checkpoint, compute="float32", shapes=((1, 5), (3, 9))):
    """The largest difference from ONNX Runtime's node-by-node outputs, relative to the largest output."""
    worst = 0.0
    with (
        Torch().open_for_trial(model, compute=compute) as session,
        OnnxRuntime().open(model, optimize=False) as reference,
    ):
        for number, (rows, length) in enumerate(shapes):
            given = captured.inputs(checkpoint, rows, length, number)
            expected, found = reference.run(given), session.run(given)
            assert list(found) == list(expected)
            for name, array in expected.items():
                assert found[name].dtype == array.dtype
                worst = max(worst, float(np.abs(found[name] - array).max() / np.abs(array).max()))
        kernels = session.kernels()
    return worst, kernels


@pytest.mark.parametrize("name", MODELS)
def test_a_translated_graph_computes_what_onnxruntime_does(name, shared):
    checkpoint, graph = captured.open_captured(shared, name)
    worst, kernels = compare(graph.path, checkpoint)
    assert worst < 1e-5
    layers = {layer.node for layer in graph.layers if layer.kind != "Gather"}
    assert layers <= {kernel.node for kernel in kernels}
    assert {kernel.precision for kernel in kernels} == {"float32"}


@pytest.mark.parametrize("name", ["bert", "residual"])
def test_int8_becomes_int8_weights_that_are_multiplied_in_float(name, shared, tmp_path):
    checkpoint, graph = captured.open_captured(shared, name)
    option, asked = EngineOption("torch", "float32"), Plan({layer.node: "int8" for layer in graph.layers})
    assert set(option.adapt(graph, asked).precision.values()) == {"int8-weight"}
    option.build(graph, asked, tmp_path / "model.onnx")
    worst, kernels = compare(tmp_path / "model.onnx", checkpoint)
    assert worst < 1e-5
    assert {kernel.precision for kernel in kernels} == {"float32"}
    assert find_reason("torch", "linear", "int8", "float32", "float32", quantized=False).startswith("the engine torch")


@pytest.mark.parametrize("name", ["bert", "residual"])
def test_products_in_bf16_stay_within_its_precision(name, shared):
    checkpoint, graph = captured.open_captured(shared, name)
    if "bfloat16" in Torch().computes():
        worst, kernels = compare(graph.path, checkpoint, "bfloat16")
        assert 1e-5 < worst < 0.05
        assert {kernel.precision for kernel in kernels} == {"bfloat16"}
    else:
        assert not BF16 & set(Torch().computes())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, within its compiler
def test_what_is_compiled_at_opening_serves_all_sizes_and_tells_its_kernels(shared, tmp_path):
    checkpoint, graph = captured.open_captured(shared, "tied")
    model = tmp_path / "model.onnx"
    EngineOption("torch", "float32").build(graph, Plan({layer.node: "int8" for layer in graph.layers}), model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with Torch().open(model) as session, OnnxRuntime().open(model, optimize=False) as reference:
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for rows in (2, 5, 7, 3, 1):
            given = captured.inputs(checkpoint, rows, 2 * rows, rows)
            expected, found = reference.run(given), session.run(given)
            for name, array in expected.items():
                assert np.abs(found[name] - array).max() < 1e-5 * np.abs(array).max()
        counters = torch._dynamo.utils.counters["stats"]
        assert counters["unique_graphs"] == 2, "for one row, and for several; both were compiled when it was opened"
        assert compiled == counters["unique_graphs"]
        assert {kernel.kind for kernel in session.kernels()} <= {"mkldnn._linear_pointwise", "mkl._mkl_linear", "bmm"}
        assert {kernel.precision for kernel in session.kernels()} == {"float32"}


PROGRAM = """
_frozen_param6 = None  # device(type='cpu') torch.bfloat16 (16, 3, 3, 3) (27, 1, 9, 3) 7f20
buf0 = empty_strided_cpu((s3, 8), (8, 1), torch.bfloat16)
# Topologically Sorted Source Nodes: [to, relu], Original ATen: [aten._to_copy, aten.relu]
buf1 = torch.ops.mkldnn._convolution_pointwise.default(buf0, _frozen_param6, None, [1, 1])
assert_size_stride(buf1, (3, 4), (4, 1), 'torch.ops.mkldnn._convolution_pointwise.default')
buf2 = empty_strided_cuda((s3, 8), (8, 1), torch.float16)
# Topologically Sorted Source Nodes: [linear, to_2, linear_1], Original ATen: [aten.addmm]
triton_tem_fused_addmm_3.run(buf2, arg1_1, stream=stream0)
# Topologically Sorted Source Nodes: [multiply], Original ATen: [aten.bmm]
extern_kernels.bmm(reinterpret_tensor(buf7, (4, 8), (8, 1), 0), buf2, out=buf9)
cpp_fused_clone_1(buf9)
"""


def test_the_kernels_of_a_compiled_program_are_found_by_name_and_else_by_order():
    calls = parse_calls(PROGRAM)
    assert [(call.name, call.kind, call.dtype) for call in calls] == [
        ("mkldnn._convolution_pointwise", "convolution", "bfloat16"),
        ("triton_tem_fused_addmm_3", "linear", "float16"),
        ("bmm", "matmul", "float16"),
    ]
    asked = [
        Kernel("a", "linear", "float32"),
        Kernel("b", "linear", "float32"),
        Kernel("c", "convolution", "float32"),
        Kernel("d", "matmul", "float32"),
    ]
    found = find_kernels(asked, ["linear", "linear_1", "convolution", "multiply"], PROGRAM)
    assert found == [
        asked[0],
        Kernel("b", "triton_tem_fused_addmm_3", "float16"),
        Kernel("c", "mkldnn._convolution_pointwise", "bfloat16"),
        Kernel("d", "bmm", "float16"),
    ]


def test_weights_are_frozen_while_any_run_is_compiled_and_not_after():
    assert not inductor.freezing
    with FROZEN.hold():
        with FROZEN.hold():
            assert inductor.freezing
        assert inductor.freezing
    assert not inductor.freezing


def make_model(nodes, weights=()):
    info = helper.make_tensor_value_info
    inputs, outputs = [info("x", TensorProto.FLOAT, ("batch", 4))], [info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def write(path, nodes, weights=()):
    onnx.save(make_model(nodes, weights), path)
    return path


def test_values_that_are_no_number_are_found(tmp_path):
    nodes = [
        helper.make_node("Log", ["x"], ["logarithm"], "log"),
        helper.make_node("IsNaN", ["logarithm"], ["missing"], "missing"),
        helper.make_node("Where", ["missing", "x", "logarithm"], ["y"], "choose"),
    ]
    with Torch().open_for_trial(write(tmp_path / "m.onnx", nodes), compute="float32") as session:
        found = session.run({"x": np.asarray([[-2.0, 1.0, 1.0, -1.0]], np.float32)})["y"]
    assert found.tolist() == [[-2.0, 0.0, 0.0, -1.0]]


def test_an_operator_that_is_not_known_is_named(tmp_path):
    model = write(tmp_path / "m.onnx", [helper.make_node("Det", ["x"], ["y"], "determinant")])
    with pytest.raises(RuntimeFailure, match=r"Det 'determinant'.*--runtime"):
        Torch().open_for_trial(model)


def test_text_of_a_graph_never_becomes_code(tmp_path):
    """Names that would be statements, if they were written into a program, are only names."""
    evil = "x); import os; os.abort(); (y"
    nodes = [helper.make_node("Relu", ["x"], [evil], evil), helper.make_node("Neg", [evil], ["y"], evil)]
    with Torch().open_for_trial(write(tmp_path / "m.onnx", nodes)) as session:
        assert session.run({"x": np.ones((1, 4), np.float32)})["y"].tolist() == [[-1.0] * 4]
    nodes = [helper.make_node("Gelu", ["x"], ["y"], "g", approximate=evil)]
    with pytest.raises(RuntimeFailure, match="no word"):
        Torch().open_for_trial(write(tmp_path / "m.onnx", nodes))


def test_a_graph_within_a_node_is_refused(tmp_path):
    body = helper.make_graph([], "body", [], [])
    model = write(tmp_path / "m.onnx", [helper.make_node("Loop", ["", ""], ["y"], "loop", body=body)])
    with pytest.raises(RuntimeFailure, match="is a graph"):
        Torch().open_for_trial(model)


@pytest.mark.parametrize("location", ["../outside.data", "none.data"])
def test_data_that_is_missing_or_lies_outside_the_folder_is_refused(location, tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "outside.data").write_bytes(np.ones(4, np.float32).tobytes())
    weight = numpy_helper.from_array(np.ones(4, np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    (folder / "m.onnx").write_bytes(
        make_model([helper.make_node("Add", ["x", "w"], ["y"], "sum")], [weight]).SerializeToString()
    )
    with pytest.raises(RuntimeFailure, match="outside the model's folder"):
        Torch().open_for_trial(folder / "m.onnx")


def test_weights_are_read_in_every_form_that_onnx_has(tmp_path):
    plain = [
        helper.make_tensor("floats", TensorProto.FLOAT, (3,), [1.5, -2, 0]),
        helper.make_tensor("int64s", TensorProto.INT64, (2,), [-1, 1 << 40]),
        helper.make_tensor("int8s", TensorProto.INT8, (2, 1), [-128, 127]),
        helper.make_tensor("bools", TensorProto.BOOL, (2,), [True, False]),
        numpy_helper.from_array(np.float16([[1, 2]]), "halves"),
    ]
    found = read_graph(write(tmp_path / "m.onnx", [helper.make_node("Identity", ["x"], ["y"], "i")], plain)).weights
    assert {name: (array.dtype.name, array.tolist()) for name, array in found.items()} == {
        "floats": ("float32", [1.5, -2, 0]),
        "int64s": ("int64", [-1, 1 << 40]),
        "int8s": ("int8", [[-128], [127]]),
        "bools": ("bool", [True, False]),
        "halves": ("float16", [[1, 2]]),
    }


def test_without_a_compiler_the_engine_says_what_to_install(shared, monkeypatch):
    _, graph = captured.open_captured(shared, "tied")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeFailure, match=r"C\+\+ compiler.*Install g\+\+"):
        Torch().open(graph.path)


def test_it_is_tried_only_where_it_is_named():
    assert "torch" in ENGINES_ON_REQUEST["cpu"]
    assert all({"torch", "torch-cuda"}.isdisjoint(engines) for engines in TARGETS.values())
    assert Recipe.default("m", engine_only="torch").engines == ("torch",)
    assert Recipe.default("m", runtimes=["openvino", "torch"]).engines == ("openvino", "torch")
    with pytest.raises(RecipeError, match="'torch' is not an engine of target 'cuda'"):
        Recipe.default("m", target="cuda", engine_only="torch")


def test_a_missing_torch_is_named_in_one_sentence(monkeypatch):
    for name in ("torch", "laconic.runtimes.torch_engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackage, match=r"package 'torch' is required.*pip install 'laconic\[compress\]'"):
        resolve("runtime", "torch")


def test_compiled_programs_are_kept_in_the_cache_folder_of_the_user_apart_for_each_instruction_set(shared, tmp_path):
    code = (
        "import pathlib, sys; from laconic.runtimes.runtime import make_runtime; "
        "make_runtime('torch').open(pathlib.Path(sys.argv[1]))"
    )
    _, graph = captured.open_captured(shared, "tied")
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    for instructions in ("avx2", "default"):
        environment |= {"LACONIC_CACHE": str(tmp_path), "ATEN_CPU_CAPABILITY": instructions}
        subprocess.run([sys.executable, "-c", code, str(graph.path)], env=environment, check=True, capture_output=True)
    folders = list((tmp_path / "torch-compile").iterdir())
    assert len(folders) == 2
    assert all(list(folder.rglob("*.so")) for folder in folders), "the programs are there, and not elsewhere"
