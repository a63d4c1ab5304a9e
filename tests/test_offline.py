"""No telemetry, nothing fetched: a promise, held against the engines too."""

import subprocess
import sys

import pytest

WATCH = """
import os, sys
seen = []
reaching = {"socket.connect", "socket.getaddrinfo", "socket.sendto", "urllib.Request", "subprocess.Popen", "os.fork"}
def watch(event, arguments):
    if event in reaching:
        seen.append((event, str(arguments)[:200]))
sys.addaudithook(watch)
import atexit
atexit.register(lambda: print("seen:", *seen))
"""

OPEN_OPENVINO = """
from pathlib import Path
import numpy as np
import onnx
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
onnx.save(model, "relu.onnx")
from laconic.registry import resolve
with resolve("runtime", ENGINE)().open(Path("relu.onnx")) as session:
    assert session.run({"x": -np.ones((2, 3), np.float32)})["y"].sum() == 0
"""

RUN = {
    "openvino": "ENGINE = 'openvino'" + OPEN_OPENVINO,
    "onnxruntime": "ENGINE = 'onnxruntime'" + OPEN_OPENVINO,
    "server": "import serve.server",
    "help": (
        "from typer.testing import CliRunner; from laconic.commands.command_line import app; "
        "CliRunner().invoke(app, ['--help'])"
    ),
}


@pytest.mark.parametrize("what", RUN)
def test_nothing_is_sent_and_nothing_is_written_at_home(what, tmp_path):
    if what in ("openvino", "onnxruntime"):
        pytest.importorskip("onnx")
        pytest.importorskip(f"laconic.runtimes.{what}")
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WATCH + RUN[what]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "seen:"
    assert list(home.rglob("*")) == []
