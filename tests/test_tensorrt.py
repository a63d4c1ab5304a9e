"""The TensorRT runtime, as far as it can be tested without a GPU: what an engine is built from, where it is kept, what
is read back from it. The test at the end needs a GPU.
"""

import ast
import json
import logging
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from laconic import registry
from laconic.cache import Cache
from laconic.errors import MissingPackage, RuntimeFailure, UsageError
from laconic.runtimes.device_policy import ReplayCache, grow
from laconic.runtimes.engine_inspector import parse_kernels
from laconic.runtimes.engine_messages import ParserProblem, explain_builder, explain_parser
from laconic.runtimes.engine_spec import AXIS_BOUNDS, BATCH_BOUNDS, Bounds, EngineSpec, describe_model, make_profile
from laconic.runtimes.engine_store import EngineStore
from laconic.runtimes.onnx_file import GraphInput, read_inputs, read_weights
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import Kernel, find_kernel, make_runtime

HOME = Path(__file__).parents[1]
SURFACE = json.loads((HOME / "tests" / "tensorrt_surface.json").read_text())


def make_mlp(weight=None, shape=("batch", 8)):
    """x times a matrix, ReLU."""
    weight = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32) if weight is None else weight
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], "fc/MatMul"), helper.make_node("Relu", ["h"], ["y"], "relu")],
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [shape[0], 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def save(model, path, **settings):
    onnx.save(model, path, **settings)
    return path


# ---- what an engine is built from


def test_the_names_of_axes_are_read_from_the_file(tmp_path):
    info, float32, int64 = helper.make_tensor_value_info, TensorProto.FLOAT, TensorProto.INT64
    inputs = [
        info("ids", int64, ["batch", "seq"]),
        info("image", float32, [None, 3, "h", 224]),
        info("scalar", float32, []),
    ]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["scalar"], ["out"])],
        "graph",
        [*inputs, info("w", float32, [2])],
        [info("out", float32, [])],
        [numpy_helper.from_array(np.zeros(2, np.float32), "w")],
    )
    assert read_inputs(save(helper.make_model(graph), tmp_path / "model.onnx")) == [
        GraphInput("ids", ("batch", "seq"), TensorProto.INT64),
        GraphInput("image", ("image.0", 3, "h", 224), TensorProto.FLOAT),
        GraphInput("scalar", (), TensorProto.FLOAT),
    ]


@pytest.mark.parametrize("external", [False, True])
def test_weights_are_read_with_where_they_lie(external, tmp_path):
    model = make_mlp(np.arange(32, dtype=np.float32).reshape(8, 4))
    path = save(model, tmp_path / "model.onnx", save_as_external_data=external, location="model.data", size_threshold=0)
    (weight,) = read_weights(path)
    assert (weight.name, weight.dtype, weight.shape) == ("w", "float32", (8, 4))
    data = (tmp_path / weight.file).read_bytes()[weight.offset :][:128] if weight.file else weight.data
    assert np.frombuffer(data, np.float32).tolist() == list(range(32))
    assert weight.file == ("model.data" if external else "")


def test_axes_get_the_bounds_of_their_name_and_fixed_ones_keep_their_size():
    inputs = [GraphInput("ids", ("batch", "seq")), GraphInput("image", ("batch", 3, 8)), GraphInput("fixed", (1, 2))]
    found = make_profile(inputs, {"seq": (1, 64, 256)})
    assert found == {"ids": ((1, 1), (8, 64), (64, 256)), "image": ((1, 3, 8), (8, 3, 8), (64, 3, 8))}
    assert make_profile(inputs, {})["ids"].most == (BATCH_BOUNDS.most, AXIS_BOUNDS.most)


sizes = st.one_of(st.integers(1, 900), st.sampled_from(["batch", "seq", "height"]))


@given(
    st.lists(st.lists(sizes, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 900), min_size=3, max_size=3).map(sorted),
)
def test_of_any_signature_the_usual_shape_lies_between_the_two_others(shapes, bounds):
    inputs = [GraphInput(f"x{number}", tuple(shape)) for number, shape in enumerate(shapes)]
    given_bounds = {"seq": Bounds(*bounds)} if any("seq" in shape for shape in shapes) else {}
    profile = make_profile(inputs, given_bounds)
    assert set(profile) == {each.name for each in inputs if any(isinstance(axis, str) for axis in each.shape)}
    for each in inputs:
        if each.name in profile:
            assert all(len(shape) == len(each.shape) for shape in profile[each.name])
            for axis, least, usual, most in zip(each.shape, *profile[each.name], strict=True):
                assert 1 <= least <= usual <= most
                if isinstance(axis, int):
                    assert least == most == axis
                elif axis == "seq":
                    assert [least, usual, most] == bounds


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"sequence": (1, 2, 3)}, "axis 'sequence', which no input has"),
        ({"seq": (1, 9, 3)}, "'seq' are 1, 9, 3"),
        ({"seq": (0, 1, 3)}, "at least 1"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(shapes, words):
    with pytest.raises(UsageError, match=words):
        make_profile([GraphInput("ids", ("batch", "seq"))], shapes)


def prune_two_of_four(weight, axis):
    """Zero the two smallest of any four successive numbers along an axis."""
    moved = np.moveaxis(weight.copy(), axis, -1)
    groups = moved.reshape(-1, 4)
    np.put_along_axis(groups, np.argsort(np.abs(groups), axis=1)[:, :2], 0, axis=1)
    return np.moveaxis(groups.reshape(moved.shape), -1, axis)


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_two_four_sparse_weights_are_found(dtype, external, tmp_path):
    weight = np.random.default_rng(0).integers(1, 9, (8, 16)).astype(dtype)
    stored = {"save_as_external_data": external, "size_threshold": 0, "location": "weights"}
    for axis in (0, 1):
        path = save(make_mlp(prune_two_of_four(weight, axis)), tmp_path / f"{axis}.onnx", **stored)
        assert describe_model(path, {})[2] is True
        (tmp_path / "weights").unlink(missing_ok=True)
    assert describe_model(save(make_mlp(weight), tmp_path / "dense.onnx"), {})[2] is False


def test_half_of_the_weights_at_random_are_not_two_of_four(tmp_path):
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    weight[np.random.default_rng(1).random((64, 64)) < 0.6] = 0
    assert describe_model(save(make_mlp(weight), tmp_path / "model.onnx"), {})[2] is False


def make_spec(path, **changed):
    digests, profile, sparse = describe_model(path, changed.pop("shapes", {}))
    device = {"gpu": "NVIDIA H100", "capability": "9.0", "driver": "CUDA 13.2, 580.1", "tensorrt": "11.4.0.106"}
    return EngineSpec(
        **{"model": digests, "profile": profile, "sparse": sparse, "workspace": 2**30, **device, **changed}
    )


def test_everything_that_an_engine_depends_on_changes_its_key_and_timings_are_shared_on_a_device(tmp_path):
    path = save(make_mlp(), tmp_path / "model.onnx")
    changed = [
        {"gpu": "NVIDIA L4"},
        {"capability": "8.9"},
        {"driver": "CUDA 13.3"},
        {"tensorrt": "11.5"},
        {"workspace": 1},
        {"sparse": True},
        {"shapes": {"batch": (1, 4, 16)}},
    ]
    keys = {make_spec(path, **each).key for each in changed} | {make_spec(path).key}
    save(make_mlp(np.ones((8, 4), np.float32)), path)
    keys.add(make_spec(path).key)
    assert len(keys) == len(changed) + 2
    assert make_spec(path).key == make_spec(path).key
    first = make_spec(save(make_mlp(), tmp_path / "first.onnx"))
    second = make_spec(save(make_mlp(np.ones((8, 4), np.float32)), tmp_path / "second.onnx"))
    assert first.device_key == second.device_key
    assert first.device_key != make_spec(tmp_path / "first.onnx", tensorrt="11.5").device_key


def test_the_key_holds_the_external_data(tmp_path):
    path = save(make_mlp(), tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    before = make_spec(path).key
    (tmp_path / "data").write_bytes(bytes(128))
    assert make_spec(path).key != before
    (tmp_path / "data").write_bytes(bytes(100))
    with pytest.raises(RuntimeFailure, match="data ends before w does"):
        make_spec(path)
    (tmp_path / "data").unlink()
    with pytest.raises(RuntimeFailure, match=r"model\.onnx.*external data"):
        make_spec(path)


@pytest.mark.parametrize("content", [b"", b"\x00not a model", None])
def test_what_is_no_model_is_refused_by_name(content, tmp_path):
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RuntimeFailure, match=r"model\.onnx"):
        describe_model(path, {})


# ---- where engines are kept


@pytest.fixture
def store(tmp_path):
    return EngineStore(Cache(tmp_path / "cache"))


def test_what_was_stored_is_read_again(store):
    assert store.read("key.engine", {"gpu": "a"}) is None
    payload = bytes(range(256)) + b"\n\n"
    store.write("key.engine", payload, {"gpu": "a", "shapes": ((1, 2), (3, 4))})
    assert store.read("key.engine", {"shapes": [[1, 2], [3, 4]], "gpu": "a"}) == payload


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: content[:10],
        lambda content: b"",
        lambda content: content[:-3] + b"xyz",
        lambda content: b"foreign engine",
    ],
    ids=["cut off", "cut off in the head", "empty", "changed", "foreign"],
)
def test_a_damaged_engine_is_removed_with_a_warning(spoil, store, caplog):
    store.write("key.engine", b"engine bytes", {"gpu": "a"})
    path = store.folder / "key.engine"
    path.write_bytes(spoil(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "laconic.tensorrt"):
        assert store.read("key.engine", {"gpu": "a"}) is None
    assert "key.engine cannot be used" in caplog.text
    assert not path.exists()


def test_an_engine_of_another_gpu_is_not_used_and_one_that_cannot_be_written_leaves_nothing(store, caplog, monkeypatch):
    store.write("key.engine", b"engine bytes", {"gpu": "a"})
    assert store.read("key.engine", {"gpu": "b"}) is None
    assert "made for another" in caplog.text

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        store.write("key.engine", b"engine", {})
    assert list(store.folder.iterdir()) == []


# ---- memory and replays


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 2**40))
def test_a_buffer_is_large_enough_and_never_shrinks(needed, held, most):
    size = grow(needed, held, most)
    assert size >= max(needed, held)
    assert size <= max(held, needed, min(2 * max(needed, 1), most))


def test_a_buffer_that_follows_growing_requests_is_allocated_rarely():
    held, allocations = 0, 0
    for needed in range(1, 4097):
        size = grow(needed, held, 10**6)
        allocations += size != held
        held = size
    assert allocations <= 13
    assert grow(900, 0, 1000) == 1000, "not more than the engine can need"


def test_shapes_are_captured_when_they_come_again_and_the_least_used_leave():
    replays = ReplayCache(capacity=2, after=3)
    assert [replays.count("a") for _ in range(4)] == [False, False, True, True]
    assert replays.find("a") is None
    assert replays.put("a", 1) == []
    assert replays.put("b", 2) == []
    assert replays.find("a") == 1
    assert replays.put("c", 3) == [2]
    assert replays.find("b") is None
    assert replays.put("c", 4) == [3]
    assert replays.clear() == [1, 4]
    assert replays.find("a") is None
    assert replays.count("a") is False


@given(st.lists(st.integers(0, 200), max_size=300))
def test_the_counts_of_shapes_take_bounded_memory(keys):
    replays = ReplayCache(capacity=2, after=2)
    for key in keys:
        if replays.find(key) is None and replays.count(key):
            replays.put(key, key)
    assert len(replays._runs) <= 32
    assert len(replays.clear()) <= 2


# ---- what is read back from an engine

CONVOLUTION = {
    "Name": "res4/conv + res4/relu",
    "LayerType": "CaskConvolution",
    "Inputs": [
        {
            "Name": "res3",
            "Dimensions": [16, 512, 28, 28],
            "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format.",
        }
    ],
    "Outputs": [{"Name": "res4", "Dimensions": [16, 256, 28, 28], "Format/Datatype": "Int8"}],
    "ParameterType": "Convolution",
    "Weights": {"Type": "Int8", "Count": 131072},
    "TacticName": "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_simple_t1r1s1",
    "TacticValue": "0x11bde0e1d9f2f35d",
}
"""A layer in the form of TensorRT 10, in which the name is all that tells the nodes."""
PRODUCT = {
    "Name": "__myl_MulAdd_myl0_3",
    "LayerType": "gemm",
    "Inputs": [
        {"Name": "x", "Location": "Device", "Dimensions": [8, 384], "Format": "Row major linear", "DataType": "Half"}
    ],
    "Outputs": [{"Name": "y", "Dimensions": [8, 384], "DataType": "Half"}],
    "TacticName": "sm80_xmma_gemm_f16f16_f16f16_f16_tn_n_tilesize32x32x64",
    "Metadata": "[ONNX Layer: encoder/query/MatMul]\x1f[ONNX Layer: encoder/query/Add]\x1e[ONNX Layer: odd [name]]",
}
"""A layer in the form of TensorRT 11."""


def layers(*found):
    return json.dumps({"Layers": list(found), "I/O Tensors": []})


def test_kernels_are_read_with_their_nodes_and_their_arithmetic():
    kernels = parse_kernels(layers(CONVOLUTION, PRODUCT))
    assert kernels == [
        Kernel("res4/conv", CONVOLUTION["TacticName"], "int8"),
        Kernel("res4/relu", CONVOLUTION["TacticName"], "int8"),
        Kernel("encoder/query/MatMul", PRODUCT["TacticName"], "float16"),
        Kernel("encoder/query/Add", PRODUCT["TacticName"], "float16"),
        Kernel("odd [name]", PRODUCT["TacticName"], "float16"),
    ]
    found = find_kernel("encoder/query/MatMul", kernels)
    assert found is not None
    assert found.precision == "float16"


@pytest.mark.parametrize(
    ("tactic", "precision"),
    [
        ("sm80_xmma_gemm_i8f32_i8i32_f32_tn_n_tilesize64x64x64", "int8"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x32x64", "float32"),
        ("sm90_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n", "float8"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "bfloat16"),
    ],
)
def test_the_name_of_the_kernel_tells_the_arithmetic(tactic, precision):
    assert [each.precision for each in parse_kernels(layers(PRODUCT | {"TacticName": tactic}))] == [precision] * 3


@pytest.mark.parametrize(
    ("tensor", "precision"),
    [
        ({"Format/Datatype": "Row major linear FP16 format"}, "float16"),
        ({"Format/Datatype": "Float"}, "float32"),
        ({"Format": "Channel major", "DataType": "Int8"}, "int8"),
        ({"DataType": "FP8"}, "float8"),
        ({"DataType": "BFloat16"}, "bfloat16"),
    ],
)
def test_without_it_the_first_input_tells_the_arithmetic(tensor, precision):
    layer = {key: value for key, value in PRODUCT.items() if key != "TacticName"} | {"Inputs": [tensor]}
    assert {each.precision for each in parse_kernels(layers(layer))} == {precision}
    assert {each.kind for each in parse_kernels(layers(layer))} == {"gemm"}


def test_layers_that_move_numbers_are_no_kernels():
    assert parse_kernels(layers(CONVOLUTION | {"LayerType": "Reformat"}, PRODUCT | {"LayerType": "NoOp"})) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[]",
        "{}",
        '{"Layers": ["conv + relu"]}',
        '{"Layers": 3}',
        '{"Layers": [{"Inputs": 3}, {"Name": 1}]}',
    ],
)
def test_text_without_details_gives_no_kernels(text):
    assert parse_kernels(text) == []


# ---- what TensorRT says


def test_an_operator_that_tensorrt_lacks_and_too_little_memory_are_told_apart():
    problems = [
        ParserProblem("det", "Det", "no importer registered for op: Det.", True),
        ParserProblem("", "", "x", False),
    ]
    text = explain_parser(problems)
    assert text.startswith("TensorRT lacks Det 'det' (no importer registered for op: Det), and 1 more. ")
    assert explain_parser(problems[1:]).startswith("the parser refused the model (x)")
    assert explain_parser([]).startswith("the parser gave no reason")
    assert "too little memory" in explain_builder(["[defaultAllocator.cpp] OutOfMemory: requested 4096 bytes"])
    assert explain_builder(["first", "no implementation\nfor node."]).startswith("no implementation for node. ")
    assert explain_builder([]).startswith("the builder gave no reason")


# ---- the interface of TensorRT

VARIABLES = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "error": "ParserError",
    "inspector": "EngineInspector",
    "network": "INetworkDefinition",
    "optimization": "IOptimizationProfile",
    "parser": "OnnxParser",
    "runtime": "Runtime",
    "timing": "ITimingCache",
}
"""The names of variables that hold objects of TensorRT, and their classes."""
MODULES = ("tensorrt.py", "tensorrt_builder.py")


def find_uses(tree):
    """(class, member) of everything that code uses of TensorRT; member is None for a class itself."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        base = node.value
        name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        if name == "trt" and node.attr != "__version__":
            yield node.attr, None
        elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id == "trt":
            yield base.attr, node.attr
        elif name.lstrip("_") in VARIABLES:
            yield VARIABLES[name.lstrip("_")], node.attr


def find_unknown(tree):
    classes = SURFACE["classes"]
    return [
        f"{name}.{member}" if member else name
        for name, member in find_uses(tree)
        if name not in classes or (member and not member.startswith("__") and member not in classes[name])
    ]


@pytest.mark.parametrize("module", MODULES)
def test_what_is_used_of_tensorrt_exists_in_its_python_bindings(module):
    """tensorrt_surface.json was made by reflection over the bindings wheel of that version (the classes, and what
    `dir` gives for them), imported on a machine without a GPU. It proves names, and no behaviour.
    """
    tree = ast.parse((HOME / "laconic" / "runtimes" / module).read_text(encoding="utf-8"))
    assert len(list(find_uses(tree))) > 20
    assert find_unknown(tree) == []


def test_a_name_that_tensorrt_lacks_would_be_found_and_the_surface_holds_what_is_used():
    assert find_unknown(ast.parse("config.set_flag(trt.BuilderFlag.INT8)")) == ["BuilderFlag.INT8"]
    assert find_unknown(ast.parse("self._engine.device_memory_size")) == ["ICudaEngine.device_memory_size"]
    assert find_unknown(ast.parse("trt.IInt8Calibrator()")) == ["IInt8Calibrator"]
    trees = [ast.parse((HOME / "laconic" / "runtimes" / name).read_text(encoding="utf-8")) for name in MODULES]
    used = {name for tree in trees for name, _ in find_uses(tree)}
    assert used == set(SURFACE["classes"])
    assert all(members == sorted(members) for members in SURFACE["classes"].values())
    version = SURFACE["tensorrt"]
    assert f'"tensorrt-cu13>={".".join(version.split(".")[:2])},<12"' in (HOME / "pyproject.toml").read_text()


@pytest.mark.parametrize("module", MODULES)
def test_objects_of_tensorrt_are_held_by_variables_whose_class_is_known(module):
    """Otherwise a use of them would escape the test above."""
    for node in ast.walk(ast.parse((HOME / "laconic" / "runtimes" / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            text = ast.unparse(node.value.func)
            if text.startswith("trt.") or ".create_" in text or text.endswith("deserialize_cuda_engine"):
                (target,) = node.targets
                name = target.id if isinstance(target, ast.Name) else target.attr
                assert name.lstrip("_") in VARIABLES


# ---- the engine


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="TensorRT is installed")
def test_without_tensorrt_the_extra_is_named():
    with pytest.raises(MissingPackage, match=r"pip install 'laconic\[tensorrt\]'"):
        make_runtime("tensorrt")
    assert registry.missing_package("cuda.bindings").args[0].endswith("pip install 'laconic[gpu]'")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(1, 5, 5, 5, 5, 2)])
def test_a_small_network_gives_the_outputs_of_onnx_runtime(rows, tmp_path):
    """Runs the same shapes often enough to be replayed as a CUDA graph."""
    tensorrt = pytest.importorskip("laconic.runtimes.tensorrt", reason="TensorRT is not installed")
    cuda_device = pytest.importorskip("laconic.runtimes.cuda_device")
    try:
        cuda_device.find_gpu()
    except RuntimeFailure as error:
        pytest.skip(str(error))
    path = save(make_mlp(), tmp_path / "model.onnx")
    engine = tensorrt.TensorRt(shapes={"batch": (1, 4, 8)}, cache=Cache(tmp_path / "cache"))
    for _ in range(2):  # built, then loaded
        with engine.open(path) as session, OnnxRuntime().open(path) as reference:
            for number in rows:
                x = {"x": np.random.default_rng(number).standard_normal((number, 8)).astype(np.float32)}
                assert session.run(x)["y"] == pytest.approx(reference.run(x)["y"], abs=1e-4)
            with pytest.raises(RuntimeFailure, match="takes"):
                session.run({"x": np.zeros((9, 8), np.float32)})
            assert find_kernel("fc/MatMul", session.kernels()) is not None
