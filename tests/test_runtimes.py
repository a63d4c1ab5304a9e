"""One contract for every engine: the same answers, its own arrays, errors with a name."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from laconic import registry
from laconic.errors import MissingPackage, RuntimeFailure
from laconic.runtimes.fake import Fake
from laconic.runtimes.runtime import make_runtime
from laconic.tensor import TensorSpec

onnx = pytest.importorskip("onnx")
ENGINES = sorted({engine for engines in registry.TARGETS.values() for engine in engines})
FACTORS = np.arange(12, dtype=np.float32).reshape(3, 4) / 4


@pytest.fixture
def model(tmp_path):
    """x [batch, 3] to y = x times a matrix [batch, 4], and n [batch] to m = n + n."""
    info, tensor = onnx.helper.make_tensor_value_info, onnx.TensorProto
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "times"), onnx.helper.make_node("Add", ["n", "n"], ["m"])],
        "graph",
        [info("x", tensor.FLOAT, ["batch", 3]), info("n", tensor.INT64, ["batch"])],
        [info("y", tensor.FLOAT, ["batch", 4]), info("m", tensor.INT64, ["batch"])],
        [onnx.numpy_helper.from_array(FACTORS, "w")],
    )
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture(params=ENGINES)
def engine(request):
    try:
        return make_runtime(request.param)
    except MissingPackage as error:
        pytest.skip(str(error))


def inputs(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, 3)).astype(np.float32), "n": rng.integers(0, 9, rows)}


def test_zeros_round_a_maximum_are_not_taken_for_its_own_padding(engine, tmp_path):
    info, tensor = onnx.helper.make_tensor_value_info, onnx.TensorProto
    nodes = [
        onnx.helper.make_node("Pad", ["x", "pads"], ["padded"], "pad"),
        onnx.helper.make_node("MaxPool", ["padded"], ["y"], "pool", kernel_shape=[3, 3], strides=[2, 2]),
    ]
    shape = ["batch", 1, 4, 4], ["batch", 1, 2, 2]
    pads = onnx.numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads")
    ends = [info(name, tensor.FLOAT, each) for name, each in zip("xy", shape, strict=True)]
    graph = onnx.helper.make_graph(nodes, "graph", ends[:1], ends[1:], [pads])
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)
    with engine.open(path) as session:
        found = session.run({"x": np.full((1, 1, 4, 4), -1, np.float32)})["y"]
    assert found.ravel().tolist() == [0, 0, 0, -1]


def test_answers_are_right_whatever_the_rows_and_their_layout_and_are_arrays_of_their_own(engine, model):
    with engine.open(model) as session:
        for rows in (1, 5, 2, 5):
            batch = inputs(rows, seed=rows)
            answers = session.run(batch)
            assert list(answers) == ["y", "m"]
            assert answers["y"] == pytest.approx(batch["x"] @ FACTORS, abs=1e-5)
            assert answers["m"].tolist() == (2 * batch["n"]).tolist()
        batch = inputs(4)
        before = {name: array.copy() for name, array in batch.items()}
        first = session.run(batch)
        kept = {name: array.copy() for name, array in first.items()}
        session.run(inputs(4, seed=1))
        assert all(np.array_equal(first[name], kept[name]) for name in kept)
        assert all(np.array_equal(batch[name], before[name]) for name in before)
    assert all(np.array_equal(first[name], kept[name]) for name in kept), "they outlive the session"
    wide = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    with engine.open(model) as session:
        answers = session.run({"x": wide[:, ::2], "n": np.arange(8)[::2]})
    assert answers["y"] == pytest.approx(wide[:, ::2] @ FACTORS, abs=1e-5)
    assert answers["m"].tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("change", [{"x": np.zeros((2, 5), np.float32)}, {"x": np.zeros((2, 3, 1), np.float32)}])
def test_what_does_not_fit_fails_by_name_and_the_session_goes_on(change, engine, model):
    with engine.open(model) as session:
        with pytest.raises(RuntimeFailure, match=engine.name):
            session.run(inputs(2) | change)
        assert session.run(inputs(2))["y"].shape == (2, 4)


def test_several_sessions_run_at_the_same_time(engine, model):
    sessions = engine.open_many(model, 2)
    batches = [inputs(3, seed) for seed in range(40)]

    def work(number):
        return [sessions[number].run(batch)["y"] for batch in batches[number::2]]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    for number, answers in enumerate(found):
        for batch, answer in zip(batches[number::2], answers, strict=True):
            assert answer == pytest.approx(batch["x"] @ FACTORS, abs=1e-5)
    for session in sessions:
        session.close()


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "int8-dynamic"])
def test_arithmetic_that_the_processor_lacks_is_replaced_by_a_more_exact_one(compute, engine, model):
    with engine.open(model, compute=compute) as session:
        assert session.run(inputs(2))["y"] == pytest.approx(inputs(2)["x"] @ FACTORS, abs=0.1)


def test_openvino_computes_in_fp32_where_onednn_has_no_instructions_for_bf16(model):
    pytest.importorskip("openvino")
    code = (
        "import sys; from pathlib import Path; import numpy as np; from laconic.runtimes.runtime import make_runtime; "
        "engine = make_runtime('openvino'); print(*engine.computes()); "
        "session = engine.open(Path(sys.argv[1]), compute='bfloat16'); "
        "print(session.run({'x': np.ones((2, 3), np.float32), 'n': np.ones(2, np.int64)})['y'].shape)"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", code, str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["float32", f"(2, {FACTORS.shape[1]})"]


def test_kernels_go_by_the_name_of_the_node_or_its_output_and_a_missing_model_is_named(engine, model, tmp_path):
    with engine.open(model) as session:
        kernels = session.kernels()
    assert all(kernel.precision for kernel in kernels)
    if kernels:
        assert {kernel.node for kernel in kernels} & {"times", "y"}
    with pytest.raises(RuntimeFailure, match=r"none\.onnx"):
        engine.open(tmp_path / "none.onnx")


def test_torch_neither_changes_its_inputs_nor_gives_away_its_weights():
    torch = pytest.importorskip("torch")
    session_kind = pytest.importorskip("laconic.models.torch_session").TorchSession

    class InPlace(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(1, 2))

        def forward(self, x):
            x += 1
            return x, self.kept

    x, y, z = (TensorSpec(name=name, dtype="float32", shape=("batch", 2)) for name in "xyz")
    batch = {"x": np.zeros((1, 2), np.float32)}
    batch["x"].flags.writeable = False
    with session_kind(InPlace(), (x,), (y, z)) as session:
        answers = session.run(batch)
        answers["z"][:] = 7
        assert answers["y"].tolist() == [[1, 1]]
        assert session.run(batch)["z"].tolist() == [[0, 0]]
    assert batch["x"].tolist() == [[0, 0]]


def test_the_fake_engine_multiplies_and_waits_and_can_be_poisoned(tmp_path):
    (tmp_path / "model").write_text(json.dumps({"factor": 3, "poison": 13}))
    with Fake().open(tmp_path / "model") as session:
        assert session.run({"x": np.array([[1.0, 2.0]])})["y"].tolist() == [[3, 6]]
        with pytest.raises(RuntimeFailure, match="poison"):
            session.run({"x": np.array([[13.0]])})
        assert session.batches == [1, 1]
    (tmp_path / "model").write_text('{"faktor": 3}')
    with pytest.raises(RuntimeFailure, match="faktor"):
        Fake().open(tmp_path / "model")


SURVIVE = """
import gc, os, signal, sys, threading
from pathlib import Path
from laconic.runtimes.runtime import make_runtime

signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
sessions = [make_runtime(sys.argv[1]).open(Path(sys.argv[2]))]

def close() -> None:
    sessions.pop().close()
    gc.collect()

closing = threading.Thread(target=close)
closing.start()
closing.join()
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_signal_is_handled_after_another_thread_has_closed_the_session(engine, model):
    command = [sys.executable, "-c", SURVIVE, engine.name, str(model)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (process.returncode, process.stdout) == (0, "handled\n"), process.stderr
