"""The TensorRT runtime on a simulated device: the order of its calls, its buffers, its CUDA graphs, its errors.

Nothing here shows that TensorRT itself does what the simulation does.
"""

import json
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from simulated_gpu import Gpu, make_cuda, make_tensorrt

from laconic.cache import Cache
from laconic.errors import RuntimeFailure, UsageError

pytestmark = pytest.mark.skipif(find_spec("tensorrt") is not None, reason="TensorRT is installed")

SURFACE = json.loads((Path(__file__).parent / "tensorrt_surface.json").read_text())
WEIGHT = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
MODULES = [f"laconic.runtimes.{name}" for name in ("tensorrt", "tensorrt_builder", "cuda_device")]


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def tensorrt(gpu, monkeypatch):
    """The module laconic.runtimes.tensorrt, imported beside the simulated packages."""
    cuda, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.runtime = make_cuda(gpu)
    packages = {
        "tensorrt": make_tensorrt(gpu, SURFACE),
        "cuda": cuda,
        "cuda.bindings": bindings,
        "cuda.bindings.runtime": bindings.runtime,
    }
    for name in MODULES:  # imported beside packages that are installed
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    import laconic.runtimes.tensorrt as imported

    yield imported
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture
def make_engine(tensorrt, tmp_path):
    return lambda **settings: tensorrt.TensorRt(cache=Cache(tmp_path / "cache"), **settings)


def save(path, *nodes, weight=WEIGHT, kind=TensorProto.FLOAT, output=(4,)):
    """x [batch, 3] times a matrix, and nodes that read the product `h` and write `y`."""
    info = helper.make_tensor_value_info
    first = helper.make_node("MatMul", ["x", "w"], ["h" if nodes else "y"], "fc/MatMul")
    graph = helper.make_graph(
        [first, *nodes],
        "graph",
        [info("x", kind, ["batch", 3])],
        [info("y", kind, ["batch", *output])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model.onnx")


def inputs(rows, seed=0):
    return {"x": np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)}


def test_answers_are_right_for_any_number_of_rows_and_are_arrays_of_their_own(make_engine, model):
    with make_engine().open(model) as session:
        kept = []
        for rows in (1, 5, 2, 5, 64, 1, 5, 5, 5, 5):
            batch = inputs(rows, seed=len(kept))
            kept.append((session.run(batch)["y"], batch["x"] @ WEIGHT))
    for answer, expected in kept:
        assert answer == pytest.approx(expected, abs=1e-5)


def test_shapes_that_come_again_are_replayed(make_engine, model, gpu):
    with make_engine().open(model) as session:
        for seed in range(10):
            batch = inputs(4, seed)
            assert session.run(batch)["y"] == pytest.approx(batch["x"] @ WEIGHT, abs=1e-5)
        assert gpu.counts["captured"] == 1
        assert gpu.counts["launched"] == 7, "three runs, and then replays"


def test_replays_of_several_shapes_do_not_disturb_each_other(make_engine, model, gpu):
    with make_engine().open(model) as session:
        for seed in range(30):
            batch = inputs(seed % 6 + 1, seed)
            assert session.run(batch)["y"] == pytest.approx(batch["x"] @ WEIGHT, abs=1e-5)
    assert gpu.counts["captured"] >= 4


def test_a_buffer_that_grows_makes_the_replays_start_again(make_engine, model, gpu):
    with make_engine().open(model) as session:
        for rows in (2, 2, 2, 2, 60, 2, 2, 2, 2):
            batch = inputs(rows)
            assert session.run(batch)["y"] == pytest.approx(batch["x"] @ WEIGHT, abs=1e-5)
    assert gpu.counts["captured"] == 2


def test_all_memory_is_released(make_engine, model, gpu):
    sessions = make_engine().open_many(model, 3)
    for session in sessions:
        for _ in range(4):
            session.run(inputs(8))
    assert gpu.blocks
    for session in sessions:
        session.close()
    assert gpu.blocks == {}


def test_an_engine_is_built_once_and_again_for_other_bounds(make_engine, model, gpu):
    for _ in range(2):
        make_engine().open(model).close()
    assert gpu.counts["built"] == 1
    with make_engine(shapes={"batch": (1, 2, 4)}).open(model) as session:
        assert gpu.counts["built"] == 2
        with pytest.raises(RuntimeFailure, match=r"'x' has shape \[5, 3\], and the engine takes \[1, 3\] to \[4, 3\]"):
            session.run(inputs(5))
        assert session.run(inputs(4))["y"].shape == (4, 4)


def test_an_engine_that_tensorrt_does_not_read_is_built_again(make_engine, model, gpu, tensorrt, caplog, monkeypatch):
    make_engine().open(model).close()
    (stored,) = (make_engine()._cache.folder / "tensorrt").glob("*.engine")
    head, _, _ = stored.read_bytes().partition(b"\n")
    made_for = json.loads(head)["made_for"]
    tensorrt.EngineStore(make_engine()._cache).write(stored.name, b"of another TensorRT", made_for)
    with caplog.at_level(logging.WARNING, "laconic.tensorrt"), make_engine().open(model) as session:
        assert session.run(inputs(2))["y"].shape == (2, 4)
    assert gpu.counts["built"] == 2
    assert "TensorRT does not read it" in caplog.text


def test_timings_are_kept_and_foreign_ones_dropped(make_engine, model, tmp_path, gpu, tensorrt, caplog):
    make_engine().open(model).close()
    cache = make_engine()._cache
    (timing,) = (cache.folder / "tensorrt").glob("*.timing")
    assert timing.read_bytes().endswith(b"\nt")
    make_engine().open(save(tmp_path / "second.onnx", weight=2 * WEIGHT)).close()
    assert timing.read_bytes().endswith(b"\ntt")
    made_for = json.loads(timing.read_bytes().partition(b"\n")[0])["made_for"]
    tensorrt.EngineStore(cache).write(timing.name, b"foreign", made_for)
    make_engine().open(save(tmp_path / "third.onnx", weight=3 * WEIGHT)).close()
    assert timing.read_bytes().endswith(b"\nt")
    assert "another device" in caplog.text


def test_sparse_weights_ask_for_sparse_kernels_and_nothing_computes_in_tf32(make_engine, tmp_path):
    pruned = np.tile(np.array([[1, 0, 2, 0]], np.float32), (4, 1))
    for name, weight, flags in (("sparse", pruned[:3], ["SPARSE_WEIGHTS"]), ("dense", WEIGHT, [])):
        with make_engine().open(save(tmp_path / f"{name}.onnx", weight=weight)) as session:
            assert session._engine.content["flags"] == flags


def test_kernels_are_those_of_the_inspector_and_arrays_in_pieces_are_taken(make_engine, model):
    with make_engine().open(model) as session:
        assert [(each.node, each.precision) for each in session.kernels()] == [("fc/MatMul", "float32")]
    wide = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    with make_engine().open(model) as session:
        assert session.run({"x": wide[:, ::2]})["y"] == pytest.approx(wide[:, ::2] @ WEIGHT, abs=1e-5)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": np.zeros((2, 5), np.float32)}, r"'x' has shape \[2, 5\]"),
        ({"x": np.zeros((0, 3), np.float32)}, r"takes \[1, 3\] to \[64, 3\]"),
        ({"x": np.zeros((2, 3))}, "is float64, expected float32"),
        ({"z": np.zeros((2, 3), np.float32)}, r"the inputs are \['z'\], expected \['x'\]"),
    ],
)
def test_what_does_not_fit_fails_by_name_and_the_session_goes_on(batch, words, make_engine, model):
    with make_engine().open(model) as session:
        with pytest.raises(RuntimeFailure, match=f"tensorrt.*{words}"):
            session.run(batch)
        assert session.run(inputs(2))["y"].shape == (2, 4)


def test_an_operator_that_tensorrt_lacks_and_too_little_memory_to_build_are_told(make_engine, tmp_path, model):
    path = save(tmp_path / "det.onnx", helper.make_node("Det", ["h"], ["y"], "head/Det"))
    with pytest.raises(RuntimeFailure, match=r"det\.onnx: TensorRT lacks Det 'head/Det'"):
        make_engine().open(path)
    with pytest.raises(RuntimeFailure, match=r"model\.onnx: the GPU has too little memory to build"):
        make_engine(workspace=16).open(model)


def test_too_little_memory_to_run_is_told_and_the_session_goes_on(make_engine, model, gpu):
    with make_engine().open(model) as session:
        gpu.memory = 64
        with pytest.raises(RuntimeFailure, match="too little room"):
            session.run(inputs(60))
        assert session.run(inputs(2))["y"] == pytest.approx(inputs(2)["x"] @ WEIGHT, abs=1e-5)


def test_a_session_that_does_not_open_leaves_no_memory(make_engine, model, gpu):
    make_engine().open(model).close()
    gpu.memory = 64
    with pytest.raises(RuntimeFailure, match="too little room"):
        make_engine().open_many(model, 2)
    assert gpu.blocks == {}


def test_where_a_run_cannot_be_recorded_it_runs_as_before(make_engine, model, gpu, tensorrt, caplog, monkeypatch):
    def fail(self):
        self.handle.recorded = None
        raise RuntimeFailure("CUDA failed: cudaErrorStreamCaptureUnsupported")

    monkeypatch.setattr(tensorrt.CudaStream, "end_capture", fail)
    with make_engine().open(model) as session:
        for seed in range(8):
            batch = inputs(4, seed)
            assert session.run(batch)["y"] == pytest.approx(batch["x"] @ WEIGHT, abs=1e-5)
    assert gpu.counts["launched"] == 0
    assert caplog.text.count("not replayed as CUDA graphs") == 1


@pytest.mark.parametrize(
    ("driver", "words"),
    [(0, "has no NVIDIA driver"), (12040, "driver supports CUDA 12.4, expected 13 or later. Update the driver")],
)
def test_without_a_driver_that_is_new_enough_the_model_is_refused(driver, words, make_engine, model, gpu):
    gpu.driver = driver
    with pytest.raises(RuntimeFailure, match=rf"model\.onnx: .*{words}"):
        make_engine().open(model)


def test_bounds_of_an_unknown_axis_and_types_that_numpy_lacks_are_refused(make_engine, model, tensorrt):
    with pytest.raises(UsageError, match="axis 'rows', which no input has"):
        make_engine(shapes={"rows": (1, 2, 3)}).open(model)
    with pytest.raises(RuntimeFailure, match=r"'x' is DataType.BF16, which numpy lacks"):
        tensorrt.find_dtype("x", tensorrt.trt.DataType.BF16)


@pytest.mark.parametrize("content", [b"\x00not a model", None])
def test_what_is_no_model_is_refused_by_name(content, make_engine, tmp_path):
    path = tmp_path / "model.onnx"
    if content:
        path.write_bytes(content)
    with pytest.raises(RuntimeFailure, match=r"model\.onnx"):
        make_engine().open(path)
