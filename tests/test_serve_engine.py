"""A real model in each real engine, over HTTP."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifacts import write_artifact
from onnx import TensorProto, helper, numpy_helper
from served import change_artifact
from tritonclient import http as triton

from laconic.artifacts.manifest import MANIFEST, MODEL
from laconic.hashing import digest_file, unseal
from laconic.tensor import TensorSpec

pytestmark = pytest.mark.usefixtures("own_tasks")

WIDTH = 16


def write_linear(path: Path, placement: str) -> Path:
    """An artifact of y = x W, x [batch, seq, 16], seq being free."""
    weights = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", WIDTH]) for name in "xy")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "linear", [x], [y], [numpy_helper.from_array(weights, "w")]
    )
    write_artifact(path)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path / MODEL)
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", "seq", WIDTH)).model_dump(mode="json")
    rows = np.ones((2, 3, WIDTH), np.float32)
    files = unseal(path / MANIFEST)["files"] | {MODEL: digest_file(path / MODEL).model_dump()}
    change_artifact(path, files=files)
    return change_artifact(
        path,
        task="padded",
        placement=placement,
        inputs=[spec],
        outputs=[spec | {"name": "y"}],
        golden={"0.input.x": rows, "0.output.y": rows @ weights},
        knee=8,
    )


@contextmanager
def process(artifact: Path) -> Iterator[str]:
    """Serve in a process of its own; yields host and port.

    After OpenVINO was run by a server's threads in the process of the tests, a thread of a later test, which wrote a
    snapshot of a training, crashed in native code: in 12 of 14 runs with this test, in none of 7 without.
    """
    code = (
        "import sys; from pathlib import Path; from laconic import registry; from serve.server import serve;"
        "registry.TASKS['padded'] = 'served:Padded';"
        "serve([Path(sys.argv[1])], port=0, announce=lambda line: print(line, flush=True))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    with subprocess.Popen(
        [sys.executable, "-c", code, str(artifact)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as started:
        assert started.stdout
        try:
            yield started.stdout.readline().partition("http://")[2].split()[0]
        finally:
            started.terminate()


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_row_is_answered_alike_alone_and_in_any_company(tmp_path: Path, engine: str) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((1 + number % 3, 1 + number % 5, WIDTH)).astype(np.float32) for number in range(48)]

    def ask(client: triton.InferenceServerClient, array: np.ndarray) -> np.ndarray:
        given = triton.InferInput("x", list(array.shape), "FP32")
        given.set_data_from_numpy(array)
        return client.infer("linear", [given]).as_numpy("y")

    def ask_apart(array: np.ndarray) -> np.ndarray:
        with triton.InferenceServerClient(address) as client:
            return ask(client, array)

    with process(write_linear(tmp_path / "linear.laconic", engine)) as address:
        with triton.InferenceServerClient(address) as client:
            alone = [ask(client, array) for array in rows]
        with ThreadPoolExecutor(24) as pool:
            together = list(pool.map(ask_apart, rows))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
