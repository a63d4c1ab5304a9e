"""ONNX Runtime's sessions for GPUs: bound inputs and outputs on the CPU provider, in the memory of a simulated device.

Binding, buffers and answers are real. That the CUDA provider does with its options and graphs what the code expects is
not shown.
"""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from simulated_gpu import Gpu, make_capturing_session, make_cuda

from laconic.errors import MissingPackage, RuntimeFailure

pytestmark = pytest.mark.skipif(find_spec("cuda") is not None, reason="CUDA's Python interface is installed")

WEIGHT = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def imported(gpu, monkeypatch):
    """The module laconic.runtimes.onnxruntime_cuda beside simulated CUDA, with the CPU provider in place of CUDA's."""
    cuda, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.runtime = make_cuda(gpu)
    packages = {"cuda": cuda, "cuda.bindings": bindings, "cuda.bindings.runtime": bindings.runtime}
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    import laconic.runtimes.onnxruntime_cuda as module

    monkeypatch.setattr(module, "PROVIDER", "CPUExecutionProvider")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module.ort, "InferenceSession", make_capturing_session(gpu))
    yield module
    for name in ("onnxruntime_cuda", "cuda_device"):
        del sys.modules[f"laconic.runtimes.{name}"]


@pytest.fixture
def engine(imported):
    return imported.OnnxRuntimeCuda()


def save(path, *nodes, outputs=(("y", TensorProto.FLOAT, ["batch", 4]),), kind=TensorProto.FLOAT):
    """x [batch, 3] times a matrix, or other nodes."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes or [helper.make_node("MatMul", ["x", "w"], ["y"], "fc/MatMul")],
        "graph",
        [info("x", kind, ["batch", 3])],
        [info(*output) for output in outputs],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model.onnx")


def inputs(rows, seed=0):
    return {"x": np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)}


def test_answers_are_those_of_an_unbound_run_and_outlive_the_next_run(engine, model):
    plain = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    kept = []
    with engine.open(model) as session:
        for rows in (1, 5, 2, 5, 64, 1, 5, 5, 5, 5, 0, 3):
            batch = inputs(rows, seed=len(kept))
            kept.append((session.run(batch)["y"], plain.run(None, batch)[0]))
    for answer, expected in kept:
        assert answer.dtype == expected.dtype
        assert np.array_equal(answer, expected)


def test_an_input_that_does_not_lie_in_one_piece_is_copied_as_it_is_meant(engine, model):
    x = np.asfortranarray(inputs(6)["x"])[::2]
    with engine.open(model) as session:
        assert session.run({"x": x})["y"] == pytest.approx(x @ WEIGHT, abs=1e-6)


def test_runs_of_the_same_shapes_allocate_nothing(engine, model, gpu):
    with engine.open(model) as session:
        session.run(inputs(16))
        allocated = gpu.counts["allocated"]
        for seed in range(8):
            session.run(inputs(seed % 16 + 1, seed))
        assert gpu.counts["allocated"] == allocated
        session.run(inputs(40))
        assert gpu.counts["allocated"] == allocated + 4, "input and output, each in host memory and on the device"


def test_shapes_that_come_again_are_captured_and_replayed(engine, model, gpu):
    with engine.open(model) as session:
        session.run(inputs(10))  # later runs need no larger buffers
        for seed in range(30):
            batch = inputs(seed % 3 + 1, seed)
            assert session.run(batch)["y"] == pytest.approx(batch["x"] @ WEIGHT, abs=1e-5)
    assert gpu.counts["captured"] == 3
    assert gpu.counts["launched"] == 30 - 3 * 2, "two runs of each shape, and then its graph"


def test_a_buffer_that_moves_makes_its_graphs_useless(engine, model, gpu):
    with engine.open(model) as session:
        for rows in (2, 2, 2, 2, 60, 2, 2, 2, 2):
            batch = inputs(rows)
            assert session.run(batch)["y"] == pytest.approx(batch["x"] @ WEIGHT, abs=1e-5)
    assert gpu.counts["captured"] == 2


def test_the_number_of_captured_shapes_is_bounded(engine, imported, model, gpu):
    with engine.open(model) as session:
        session.run(inputs(100))
        for rows in range(1, 30):
            for _ in range(4):
                batch = inputs(rows)
                assert session.run(batch)["y"] == pytest.approx(batch["x"] @ WEIGHT, abs=1e-5)
    assert gpu.counts["captured"] == imported.CAPTURES


def test_a_run_that_cannot_be_captured_is_made_without_a_graph(engine, model, gpu, caplog):
    with engine.open(model) as session:
        session._session.refuses = True
        with caplog.at_level(logging.WARNING, "laconic.onnxruntime"):
            for seed in range(8):
                batch = inputs(4, seed)
                assert session.run(batch)["y"] == pytest.approx(batch["x"] @ WEIGHT, abs=1e-5)
    assert gpu.counts["captured"] == 0
    assert len(caplog.records) == 1


def test_a_model_that_the_provider_does_not_capture_is_opened_without_graphs(engine, imported, model, gpu, monkeypatch):
    usual, asked = imported.make_session, []

    def refuse(model, threads, given):
        asked.append("enable_cuda_graph" in given)
        if asked[-1]:
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        return usual(model, threads, given)

    monkeypatch.setattr(imported, "make_session", refuse)
    with engine.open(model) as session:
        for _ in range(6):
            assert session.run(inputs(2))["y"] == pytest.approx(inputs(2)["x"] @ WEIGHT, abs=1e-5)
    assert asked == [True, False]
    assert gpu.counts["captured"] == 0


def test_sessions_of_several_threads_do_not_share_buffers(engine, model):
    sessions = engine.open_many(model, 4)

    def answer(number):
        found = []
        for seed in range(50):
            batch = inputs((seed + number) % 7 + 1, seed)
            found.append((sessions[number].run(batch)["y"], batch["x"] @ WEIGHT))
        return found

    with ThreadPoolExecutor(len(sessions)) as pool:
        for found in pool.map(answer, range(len(sessions))):
            for given, expected in found:
                assert given == pytest.approx(expected, abs=1e-5)
    for session in sessions:
        session.close()


def test_outputs_of_unknown_sizes_and_types_that_numpy_lacks_are_not_bound(engine, tmp_path):
    nodes = [helper.make_node("NonZero", ["x"], ["y"])]
    model = save(tmp_path / "model.onnx", *nodes, outputs=[("y", TensorProto.INT64, [2, "found"])])
    with engine.open(model) as session:
        for _ in range(5):
            x = np.array([[0, 1, 0], [1, 0, 1]], np.float32)
            assert session.run({"x": x})["y"].tolist() == [[0, 1, 1], [1, 0, 2]]
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING)]
    model = save(tmp_path / "model.onnx", *nodes, outputs=[("y", TensorProto.STRING, ["batch", 3])])
    with engine.open(model) as session:
        assert session.run({"x": np.ones((1, 3), np.float32)})["y"].tolist() == [["1", "1", "1"]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": np.ones((2, 3))}, "input 'x' is float64, expected float32"),
        ({"x": np.ones((2, 5), np.float32)}, "onnxruntime failed: .*x"),
        ({"y": np.ones((2, 3), np.float32)}, "onnxruntime failed: .*x"),
        ({}, "onnxruntime failed: .*x"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(engine, model, given, message):
    with engine.open(model) as session:
        with pytest.raises(RuntimeFailure, match=message):
            session.run(given)
        assert session.run(inputs(2))["y"].shape == (2, 4)


def test_all_memory_is_released(engine, model, gpu, tmp_path):
    sessions = engine.open_many(model, 3)
    for session in sessions:
        for _ in range(5):
            session.run(inputs(8))
    assert gpu.blocks
    for session in sessions:
        session.close()
    assert gpu.blocks == {}


def test_what_cannot_be_opened_and_the_build_for_cpus_are_refused(engine, tmp_path, gpu, imported, monkeypatch):
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    with pytest.raises(RuntimeFailure, match=r"onnxruntime refused .*broken\.onnx"):
        engine.open(tmp_path / "broken.onnx")
    assert gpu.blocks == {}
    monkeypatch.setattr(imported, "PROVIDER", "CUDAExecutionProvider")
    with pytest.raises(MissingPackage, match="the one for CPUs"):
        imported.OnnxRuntimeCuda()


def test_a_device_that_is_full_is_named(engine, model, gpu):
    with engine.open(model) as session:
        gpu.memory = 100
        with pytest.raises(RuntimeFailure, match="too little room"):
            session.run(inputs(1000))
        assert session.run(inputs(1))["y"].shape == (1, 4)
