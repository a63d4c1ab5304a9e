"""Artifacts of strangers: whatever is wrong with one, each command refuses it in a sentence, and opens nothing else."""

import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifacts import embedding_task, write_artifact
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file
from test_trust import write_embedder

from laconic.artifacts.artifact import Artifact
from laconic.artifacts.artifact_files import TOKENIZER_BYTES
from laconic.artifacts.manifest import GOLDEN, MANIFEST, MEASURED, MODEL, REPORT
from laconic.cache import VARIABLE
from laconic.errors import LaconicError
from laconic.files import MAX_BYTES
from laconic.hashing import digest_file, seal, unseal
from laconic.runtimes.onnx_file import find_external_files
from laconic.tasks.assets import LABELS, PREPROCESS, TOKENIZER
from serve.model_repository.loader import open_models
from serve.settings.server_settings import Settings

CPU_SECONDS, SECONDS = 2, 60
"""The processor time that a refusal may take, and the time after which one that waits, as for a pipe, has failed."""
OPENED: list[str] | None = None
"""The paths that were opened, while they are recorded."""


def record_open(event, arguments):
    if event == "open" and OPENED is not None and isinstance(arguments[0], (str, bytes)):
        OPENED.append(os.fsdecode(arguments[0]))


sys.addaudithook(record_open)


class TakesTooLong(BaseException):
    """A refusal took longer than it may."""


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """The paths that are opened from now on, with limits on the time of the test."""
    global OPENED

    def stop(number, frame):
        raise TakesTooLong

    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, 3 * CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    OPENED = []
    yield OPENED
    OPENED = None
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def write_onnx(path, **options):
    """An artifact of y = x w for ONNX Runtime, its weights in a file of their own."""
    write_artifact(path)
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 3], (2 * np.eye(3, dtype=np.float32)).tobytes(), raw=True)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], "net", [x], [y], [weight]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path / MODEL, save_as_external_data=True, location="model.data", size_threshold=0)
    reseal(path, placement="onnxruntime", add=("model.data",))
    return path


def reseal(path, add=(), **changes):
    """Seal an artifact again as whoever crafts one would: with new digests, and other keys in its manifest."""
    manifest = unseal(path / MANIFEST)
    names = [name for name in (*manifest["files"], *add) if (path / name).is_file()]
    manifest["files"] |= {name: digest_file(path / name).model_dump() for name in names}
    (path / MANIFEST).write_bytes(seal(manifest | changes))
    measured = unseal(path / MEASURED) | {"report": digest_file(path / REPORT).sha256}
    (path / MEASURED).write_bytes(seal(measured))


def edit(path, name, **changes):
    """Seal a file with other values of some keys."""
    (path / name).write_bytes(seal(unseal(path / name) | changes))


def write_asset(path, name, content):
    (path / name).write_bytes(content)
    reseal(path, add=(name,))


def write_golden(path, **tensors):
    """Golden tensors in the place of some, or without those that are None. x is the input."""
    named = {f"0.{'input' if name == 'x' else 'output'}.{name}": array for name, array in tensors.items()}
    arrays = load_file(path / GOLDEN) | named
    save_file({name: array for name, array in arrays.items() if array is not None}, path / GOLDEN)
    reseal(path)


def link(path, name, secret):
    """Put a link in the place of a file, to a copy with the same bytes: no digest differs."""
    secret.write_bytes((path / name).read_bytes())
    (path / name).unlink()
    (path / name).symlink_to(secret)


def nest(path, secret):
    inner = {}
    for _ in range(2000):
        inner = {"a": inner}
    (path / MANIFEST).write_text(
        json.dumps(unseal(path / MANIFEST))[:-1] + ', "recipe": ' + "[" * 5000 + "]" * 5000 + "}"
    )


def make_pipe(path, name):
    (path / name).unlink()
    os.mkfifo(path / name)


def make_socket(path, name):
    (path / name).unlink()
    here = Path.cwd()
    os.chdir(path)  # the path of a socket has 100 characters at most
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
    os.chdir(here)


def grow(path, name, size):
    """Make a file sparse and large."""
    with (path / name).open("r+b") as file:
        file.truncate(size)


def move_weights(path, location):
    """Have the weights of a model lie elsewhere."""
    model = onnx.load(path / MODEL, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    (path / MODEL).write_bytes(model.SerializeToString())
    reseal(path)


def drop_figure(path):
    """Have the verdict's comparison with the engine lack the figure that the floor of golden outputs is made from."""
    verdict = unseal(path / MANIFEST)["verdict"]
    verdict["parity"] = [verdict["parity"][0] | {"check": "engine"}]
    edit(path, MANIFEST, verdict=verdict)


def time_in(path, **changes):
    timing = {
        "engine": "fake", "batch": 1, "length": 0, "threads": 1, "seconds": 1e-3, "quartiles": [1e-3, 1e-3],
        "speedup": 1.0, "speedup_quartiles": [1.0, 1.0],
    }  # fmt: skip
    edit(path, MEASURED, timings=[timing | changes])


def list_file(path, name, secret):
    """Have the manifest list another file."""
    edit(path, MANIFEST, files=unseal(path / MANIFEST)["files"] | {name: digest_file(secret).model_dump()})


def describe_input(path, **changes):
    """Have the manifest describe another input."""
    edit(path, MANIFEST, inputs=[SPEC | changes])


SPEC = {"name": "x", "dtype": "float32", "shape": ["batch", 3]}
ALTERNATIVE = {"runtime": "fake", "compute": "float32", "precision": {}, "verdict": None, "model": MODEL}
HOSTILE = {
    "empty manifest": lambda path, secret: (path / MANIFEST).write_text("{}"),
    "manifest is a list": lambda path, secret: (path / MANIFEST).write_text("[]"),
    "manifest is not UTF-8": lambda path, secret: (path / MANIFEST).write_bytes(b'{"task": "\xff\xfe"}'),
    "manifest with half a surrogate": lambda path, secret: (path / MANIFEST).write_text('{"task": "\\ud800"}'),
    "manifest is nested deep": nest,
    "manifest is huge": lambda path, secret: (path / MANIFEST).write_bytes(b" " * (MAX_BYTES + 1)),
    "a million keys": lambda path, secret: edit(path, MANIFEST, **{f"{key:x}": 0 for key in range(600_000)}),
    "as many keys as are read": lambda path, secret: edit(path, MANIFEST, **{f"{key:x}": 0 for key in range(95_000)}),
    "as many wrong values as are read": lambda path, secret: edit(path, MANIFEST, history=[{}] * 95_000),
    "a million wrong values": lambda path, secret: edit(
        path, MANIFEST, precision=dict.fromkeys(map(str, range(400_000)), 0)
    ),
    "a million stages": lambda path, secret: edit(path, MANIFEST, history=[{}] * 1_000_000),
    "file in another folder": lambda path, secret: list_file(path, "../secret", secret),
    "file with an absolute path": lambda path, secret: list_file(path, str(secret), secret),
    "file without a name": lambda path, secret: list_file(path, "", secret),
    "file with a NUL in its name": lambda path, secret: list_file(path, "a\0b", secret),
    "no files": lambda path, secret: edit(path, MANIFEST, files={}),
    "unknown task": lambda path, secret: edit(path, MANIFEST, task="os:system"),
    "unknown runtime": lambda path, secret: edit(path, MANIFEST, placement="../secret"),
    "alternative without files": lambda path, secret: edit(
        path, MANIFEST, format=2, alternatives=[ALTERNATIVE | {"golden": "../secret"}]
    ),
    "negative axis": lambda path, secret: describe_input(path, shape=["batch", -3]),
    "huge axes": lambda path, secret: describe_input(path, shape=["batch", 10**6, 10**6]),
    "a thousand axes": lambda path, secret: describe_input(path, shape=["batch"] * 1000),
    "bounds out of order": lambda path, secret: describe_input(path, shape=["batch", "n"], bounds={"n": [9, 1]}),
    "missing figure": lambda path, secret: drop_figure(path),
    "timing of no seconds": lambda path, secret: time_in(path, seconds=0.0),
    "timing that is NaN": lambda path, secret: time_in(path, seconds=float("nan")),
    "timing of no rows": lambda path, secret: time_in(path, batch=0),
    "knee below one": lambda path, secret: edit(path, MEASURED, knee=-1),
    "measurements are a list": lambda path, secret: (path / MEASURED).write_text("[]"),
    "linked report": lambda path, secret: link(path, REPORT, secret),
    "linked model": lambda path, secret: link(path, MODEL, secret),
    "linked golden outputs": lambda path, secret: link(path, GOLDEN, secret),
    "linked manifest": lambda path, secret: link(path, MANIFEST, secret),
    "linked measurements": lambda path, secret: link(path, MEASURED, secret),
    "link that nothing lists": lambda path, secret: (path / "chat.json").symlink_to(secret),
    "file that nothing lists": lambda path, secret: (path / "vocabulary.json").write_text('{"ids": 3}'),
    "report that nothing lists": lambda path, secret: edit(path, MEASURED, report=None),
    "another report": lambda path, secret: (path / REPORT).write_text("<script>"),
    "pipe in the place of the model": lambda path, secret: make_pipe(path, MODEL),
    "pipe in the place of the manifest": lambda path, secret: make_pipe(path, MANIFEST),
    "pipe in the place of the report": lambda path, secret: make_pipe(path, REPORT),
    "socket in the place of the golden outputs": lambda path, secret: make_socket(path, GOLDEN),
    "folder in the place of the model": lambda path, secret: ((path / MODEL).unlink(), (path / MODEL).mkdir()),
    "sparse model of 40 GiB": lambda path, secret: grow(path, MODEL, 40 * 2**30),
    "sparse report of 40 GiB": lambda path, secret: grow(path, REPORT, 40 * 2**30),
    "sparse measurements of 40 GiB": lambda path, secret: grow(path, MEASURED, 40 * 2**30),
    "golden outputs of another dtype": lambda path, secret: write_golden(path, y=np.ones((2, 3), np.int64)),
    "golden outputs of another shape": lambda path, secret: write_golden(path, y=np.ones((2, 4), np.float32)),
    "golden outputs with fewer axes": lambda path, secret: write_golden(path, y=np.ones(2, np.float32)),
    "golden outputs of another name": lambda path, secret: write_golden(path, z=np.ones((2, 3), np.float32)),
    "golden inputs of another shape": lambda path, secret: write_golden(path, x=np.ones((2, 9), np.float32)),
    "golden inputs without rows": lambda path, secret: write_golden(path, x=np.ones((0, 3), np.float32)),
    "golden outputs without inputs": lambda path, secret: write_golden(path, x=None),
    "golden outputs of nothing": lambda path, secret: write_golden(path, x=None, y=None),
    "header bomb": lambda path, secret: write_asset(path, GOLDEN, struct.pack("<Q", 2**62) + b"{" * 100),
    "header of nothing but keys": lambda path, secret: write_asset(
        path, GOLDEN, struct.pack("<Q", 2**20) + (b'{"__metadata__":' + b"{" * 2**20)[: 2**20]
    ),
    "header of a tensor beyond the file": lambda path, secret: write_asset(
        path, GOLDEN, struct.pack("<Q", 70) + b'{"0.input.x":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}    '
    ),
}  # fmt: skip
"""What is done to an artifact of the fake engine; the file `secret` lies beside it."""

TEXT = {
    "tokenizer is no JSON": lambda path: write_asset(path, TOKENIZER, b"\x80\x05"),
    "tokenizer is a list": lambda path: write_asset(path, TOKENIZER, b"[]"),
    "tokenizer of another kind": lambda path: write_asset(path, TOKENIZER, b'{"model": {"type": "no"}}'),
    "tokenizer is huge": lambda path: (grow(path, TOKENIZER, TOKENIZER_BYTES + 1), reseal(path)),
    "preprocess is huge": lambda path: (grow(path, PREPROCESS, MAX_BYTES + 1), reseal(path)),
    "preprocess is a number": lambda path: write_asset(path, PREPROCESS, b"3"),
    "preprocess lacks a key": lambda path: write_asset(path, PREPROCESS, b"{}"),
    "tokenizer is linked": lambda path: link(path, TOKENIZER, path.parent / "secret"),
    "labels are a number": lambda path: (
        write_asset(path, LABELS, b"3"), reseal(path, task="text-classification", outputs=[LOGITS]),
    ),
}  # fmt: skip
LOGITS = {"name": "embedding", "dtype": "int64", "shape": ["batch", "seq"]}

GRAPHS = {
    "weights elsewhere": lambda path: move_weights(path, "../secret"),
    "weights at an absolute path": lambda path: move_weights(path, str(path.parent / "secret")),
    "weights in the folder above by a way around": lambda path: move_weights(path, "../graph.laconic/model.data"),
    "weights in no file": lambda path: move_weights(path, "gone.data"),
    "weights are linked": lambda path: link(path, "model.data", path.parent / "secret"),
    "model is no graph": lambda path: write_asset(path, MODEL, b"\x00" * 64),
    "model is empty": lambda path: write_asset(path, MODEL, b""),
    "model is cut off": lambda path: write_asset(path, MODEL, (path / MODEL).read_bytes()[:-9]),
}


def serve(path):
    """Open an artifact as the server does: exit code and message."""
    try:
        for model in open_models({"model": path}, Settings(unproven=True)):
            model.close()
    except LaconicError as error:
        return error.exit_code, f"laconic: {error}\n"
    return 0, ""


def refuse(path, laconic, opened):
    """Have every command refuse an artifact."""
    allowed = (f"{path}/", str(path.parent / "cache"), sys.prefix, sys.base_prefix, "/proc/", "/sys/", os.devnull)
    home = str(Path(__file__).resolve().parents[1])
    for verb in ("verify", "inspect", "serve"):
        code, message = serve(path) if verb == "serve" else laconic(verb, path)[::2]
        assert code == 2 or (verb == "verify" and code == 3), (verb, code, message)
        assert message.startswith("laconic: "), verb
        assert message.count("\n") == 1, (verb, message)
        assert len(message) < 2500, verb
    elsewhere = {name for name in opened if not str(Path(name).resolve()).startswith((*allowed, home))}
    assert elsewhere == set()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_artifact_is_refused_in_one_sentence(name, tmp_path, laconic, opened):
    path = write_artifact(tmp_path / "twice.laconic")
    reseal(path)
    (tmp_path / "secret").write_text("secret")
    HOSTILE[name](path, tmp_path / "secret")
    opened.clear()
    refuse(path, laconic, opened)


@pytest.mark.parametrize("name", TEXT)
def test_hostile_files_of_a_task_are_refused_in_one_sentence(name, tmp_path, laconic, opened):
    path = write_embedder(tmp_path / "embedder.laconic")
    reseal(path)
    TEXT[name](path)
    opened.clear()
    refuse(path, laconic, opened)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_reads_other_files_is_refused_in_one_sentence(name, tmp_path, laconic, opened):
    path = write_onnx(tmp_path / "graph.laconic")
    (tmp_path / "secret").write_bytes((path / "model.data").read_bytes())
    GRAPHS[name](path)
    opened.clear()
    refuse(path, laconic, opened)


@pytest.mark.parametrize("write", [write_artifact, write_embedder, write_onnx])
def test_the_same_artifacts_are_served_as_they_were_written(write, tmp_path, laconic, opened):
    path = write(tmp_path / "whole.laconic")
    reseal(path)
    os.link(path / MODEL, tmp_path / "hard-link")
    (path / ".hidden").symlink_to(tmp_path / "secret")
    (path / "README.md").symlink_to(tmp_path / "secret")
    (path / "lost+found").mkdir()
    (tmp_path / "current").symlink_to(path)
    for each in (path, tmp_path / "current"):
        assert laconic("verify", each)[0] == laconic("inspect", each)[0] == serve(each)[0] == 0
    assert str(tmp_path / "secret") not in opened


def test_golden_outputs_that_are_wrong_are_refused_by_whoever_runs_them(tmp_path, laconic):
    path = write_artifact(tmp_path / "twice.laconic")
    write_golden(path, y=-np.ones((2, 3), np.float32))
    assert laconic("verify", path)[0] == 3
    code, message = serve(path)
    assert code == 2
    assert "does not give its golden outputs" in message


def test_a_tokenizer_as_large_as_gemmas_is_read(tmp_path):
    task = embedding_task()
    path = write_embedder(tmp_path / "embedder.laconic")
    write_asset(path, TOKENIZER, task.assets()[TOKENIZER] + b" " * 35_000_000)
    assert Artifact.load(path).task().vocabulary == task.vocabulary


def find_files(path, content):
    path.write_bytes(content)
    with path.open("rb") as file:
        return find_external_files(file)


def test_external_data_are_found_wherever_a_graph_can_hold_tensors(tmp_path):
    def tensor(name):
        made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
        made.external_data.add(key="location", value=name)
        return made

    inner = helper.make_graph([], "inner", [], [], [tensor("subgraph")])
    sparse = helper.make_sparse_tensor(tensor("values"), tensor("indices"), [4])
    node = helper.make_node("If", ["x"], ["y"], then_branch=inner, value=tensor("attribute"))
    node.attribute.append(onnx.AttributeProto(name="all", type=onnx.AttributeProto.TENSORS, tensors=[tensor("list")]))
    graph = helper.make_graph([node], "graph", [], [], [tensor("weight")], sparse_initializer=[sparse])
    function = helper.make_function(
        "own", "F", [], [], [helper.make_node("Constant", [], ["c"], value=tensor("function"))], []
    )
    model = helper.make_model(graph, functions=[function])
    names = ["attribute", "function", "indices", "list", "subgraph", "values", "weight"]
    assert find_files(tmp_path / "m.onnx", model.SerializeToString()) == names
    group = b"\x7b" + model.SerializeToString() + b"\x7c"  # an unknown group, which parsers skip
    assert find_files(tmp_path / "m.onnx", group + model.SerializeToString()) == names


@pytest.mark.parametrize(
    "content",
    [b"", b"\x3a\xff", b"\x80" * 10**6, b"\x00" * 10**8, b"\x08\x01" * 10**7, b"PK\x03\x04" * 9, b"\x08\x01"],
    ids=["empty", "cut off", "endless number", "zeros", "many fields", "archive", "no graph"],
)
def test_a_file_that_is_no_graph_is_refused_at_once(content, tmp_path, opened):
    with pytest.raises(ValueError, match="it is not an ONNX file"):
        find_files(tmp_path / "m.onnx", content)
