"""The parity ledger: an answer followed from the original to the HTTP response, and the layer where it goes astray."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import digits
import models
import numpy as np
import onnx
import pytest
import torch
import transformers
from artifacts import write_artifact
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from served import running

from compress.pipeline import compress
from export.parity.captured_divergence import find_captured_divergence
from export.parity.follower import is_identical
from export.parity.placed_divergence import ErrorSum, find_placed_divergence
from export.parity.stage_results import find_teacher
from export.parity.step_list import find_engine_divergence
from export.sources import capture_graph
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.manifest import MANIFEST, MODEL
from laconic.artifacts.record import Record
from laconic.cache import VARIABLE, Cache
from laconic.commands import http_session
from laconic.errors import RuntimeFailure
from laconic.hashing import digest_file, seal, unseal
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.runtimes.runtime import Kernel
from laconic.tasks.text import WORDS

STEPS = ["original", "compressed", "captured", "placed", "engine", "HTTP"]
BUILDER = "digits:DigitsNet"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources, artifacts and the cache of these tests."""
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    """The cache that compression has filled, as on the machine of one user."""
    monkeypatch.setenv(VARIABLE, str(folder / "cache"))
    return Cache(folder / "cache")


@pytest.fixture
def own_process():
    """Ask for it to let `laconic serve` run in a process of its own, which takes two seconds to start."""


@pytest.fixture(autouse=True)
def served_here(request, monkeypatch):
    """Serve in this process, with the same settings, where no test is about the other one."""

    @contextmanager
    def serve(artifact, flag, runtime, *options):
        assert (flag, options) == ("--runtime", ("--unproven", "--threads", "1"))
        with running(artifact.path, runtime=runtime, unproven=True, threads=1) as server:
            yield http_session.StartedServer("127.0.0.1", server.port, os.getpid())

    if "own_process" not in request.fixturenames:
        monkeypatch.setattr(http_session, "start_server", serve)


def make_artifact(folder, name, **recipe):
    path = folder / f"{name}.laconic"
    made = compress(Recipe.parse(recipe), path, cache=Cache(folder / "cache"), steps=Steps(quiet=True))
    assert made.missed == ()
    return path


@pytest.fixture(scope="module")
def reader(folder):
    """The digits network in INT8, its weights and its data."""
    weights, data = digits.write(folder)
    given = {"source": str(weights), "builder": BUILDER, "data": str(data), "engine_only": "openvino"}
    stages = [{"quantize.static": {"samples": 32}}]
    return make_artifact(folder, "digits", **given, stages=stages), weights, data


@pytest.fixture(scope="module")
def embedder(folder):
    """A tiny text embedder in INT8, its folder and its data."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(120)]
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = models.save_embedder(folder / "embedder")
    given = {"source": str(source), "data": str(data), "engine_only": "onnxruntime", "goal": {"fidelity": 0.95}}
    stages = [{"quantize.static": {"samples": 32}}]
    return make_artifact(folder, "embedder", **given, stages=stages), source, data


@pytest.fixture(scope="module")
def pruned(folder, reader):
    """The digits network with fewer channels, in INT8."""
    _, weights, data = reader
    given = {"source": str(weights), "builder": BUILDER, "data": str(data), "engine_only": "onnxruntime"}
    stages = [{"prune.channels": {"keep": 0.75, "round_to": 1}}, {"quantize.static": {"samples": 32}}]
    return make_artifact(folder, "pruned", **given, stages=stages, heal=False, goal={"fidelity": 0.3, "worst": 0.0})


def read_ledger(laconic, artifact, original, *options):
    """The exit code, the rows by step, and what was printed to the standard error stream."""
    code, out, err = laconic("verify", artifact, "--ledger", "--original", original, "--json", *options)
    rows = json.loads(out)["rows"]
    assert [row["step"] for row in rows] == STEPS
    return code, {row["step"]: row for row in rows}, err


def damage(artifact, folder, name, factor):
    """A copy of an artifact with one initializer of its graph multiplied, sealed again."""
    path = folder / f"damaged-{name.replace('/', '-')}.laconic"
    shutil.copytree(artifact, path)
    model = onnx.load(path / MODEL)
    (weight,) = [each for each in model.graph.initializer if each.name == name]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(factor), name))
    onnx.save(model, path / MODEL)
    manifest = unseal(path / MANIFEST)
    manifest["files"][MODEL] = digest_file(path / MODEL).model_dump()
    (path / MANIFEST).write_bytes(seal(manifest))
    return path


def list_scales(artifact):
    return [each.name for each in onnx.load(artifact / MODEL).graph.initializer if each.name.endswith("/scale")]


def test_an_image_classifier_passes_every_step(reader, laconic, own_process):
    artifact, weights, data = reader
    code, rows, _ = read_ledger(laconic, artifact, weights, "--builder", BUILDER, "--data", data)
    assert code == 0
    assert rows["compressed"]["skipped"] == "no stage changed the module"
    assert [rows[step]["passed"] for step in STEPS] == [True, None, True, True, True, True]
    assert [each["against"] for each in rows["engine"]["comparisons"]] == ["placed", "original"]
    (captured,) = rows["captured"]["comparisons"]
    assert captured["figures"]["exactness"] > captured["required"]["exactness"] == 0.9999
    served = rows["HTTP"]["comparisons"][0]
    assert served["required"] == {"identical": 1.0}
    assert served["figures"]["identical"] == 1
    assert served["samples"] == 40
    verdict = Artifact.load(artifact).manifest.verdict
    assert rows["engine"]["comparisons"][0]["required"] == verdict.parity[1].required
    asked = rows["engine"]["comparisons"][1]["required"]
    assert asked == {name: least for name, least in verdict.drift[0].required.items() if name != "metric_change"}


def test_a_text_embedder_passes_every_step_and_the_table_says_what_ran(embedder, laconic):
    artifact, source, data = embedder
    code, out, _ = laconic("verify", artifact, "--ledger", "--original", source, "--data", data)
    assert code == 0
    assert "embedder: 40 samples, one at a time (texts.jsonl)" in out
    assert "FAILED" not in out
    for line in (
        "original: torch, float32",
        "compressed: left out, no stage changed the module",
        "captured: float graph: onnxruntime, node by node",
        "placed: model.onnx: onnxruntime, node by node",
        "engine: model.onnx: onnxruntime, float32",
        "HTTP: laconic serve: onnxruntime, float32",
    ):
        assert line in out.splitlines()


def test_in_another_engine_the_same_steps_are_followed(pruned, reader, laconic):
    _, weights, data = reader
    given = (pruned, weights, "--builder", BUILDER, "--data", data, "--runtime", "openvino")
    code, rows, _ = read_ledger(laconic, *given)
    assert code == 0
    assert rows["engine"]["ran"] == "model.onnx: openvino, float32"


def test_an_engine_that_refuses_the_graph_is_told_as_the_step_that_failed(embedder, laconic):
    artifact, source, data = embedder
    code, rows, _ = read_ledger(laconic, artifact, source, "--data", data, "--runtime", "openvino")
    assert code == 3
    assert "attention as one operator" in json.dumps(rows["engine"])


def test_made_up_samples_are_said_to_be_so_and_bound_no_loss(reader, laconic):
    artifact, weights, _ = reader
    code, out, _ = laconic("verify", artifact, "--ledger", "--original", weights, "--builder", BUILDER)
    assert code == 0, "normal noise is far outside of the range of the images that the artifact was calibrated with"
    assert "40 samples, one at a time (made-up samples)" in out
    assert "The samples are made up, and the artifact was made with others" in out


@pytest.mark.parametrize("layer", ["stem.0", "body.0"])
def test_a_wrong_weight_scale_is_named_by_its_layer(reader, laconic, tmp_path, layer):
    artifact, weights, data = reader
    (name,) = [name for name in list_scales(artifact) if name.startswith(f"{layer}") and "weight" in name]
    path = damage(artifact, tmp_path, name, 3)
    code, rows, err = read_ledger(laconic, path, weights, "--builder", BUILDER, "--data", data)
    assert code == 3
    assert "Failed: placed, engine, HTTP" in err
    assert rows["captured"]["passed"]
    found = rows["placed"]["divergence"]
    assert found["layer"] == layer
    assert found["error"] > 1 > found["allowed"]
    assert f"{layer} (" in found["says"]
    assert rows["engine"]["comparisons"][0]["passed"], "the engine computes what the wrong graph says"


@pytest.mark.parametrize("factor", [0.05, 300])
def test_a_wrong_activation_scale_is_named_by_the_layer_that_reads_it(embedder, laconic, tmp_path, factor):
    artifact, source, data = embedder
    (name,) = [each for each in list_scales(artifact) if "uint8" in each and "layer.1.intermediate" in each]
    path = damage(artifact, tmp_path, name, factor)
    code, rows, _ = read_ledger(laconic, path, source, "--data", data)
    assert code == 3
    assert rows["placed"]["divergence"]["layer"].endswith("layer.1.output.dense")


def test_outputs_that_are_no_numbers_are_followed_to_their_layer(reader, laconic, tmp_path):
    artifact, weights, data = reader
    path = damage(artifact, tmp_path, "head/MatMul/weight/scale", np.nan)
    code, rows, _ = read_ledger(laconic, path, weights, "--builder", BUILDER, "--data", data)
    assert code == 3
    assert rows["placed"]["comparisons"][0]["figures"]["fidelity"] == 0
    assert rows["placed"]["divergence"]["layer"] == "head"
    assert rows["placed"]["divergence"]["error"] is None


def test_the_module_after_pruning_is_a_step_of_its_own(reader, pruned, laconic):
    _, weights, data = reader
    code, rows, _ = read_ledger(laconic, pruned, weights, "--builder", BUILDER, "--data", data, "--trust")
    assert code == 0
    assert rows["compressed"]["ran"] == "after prune.channels: torch, float32"
    (cut,) = rows["compressed"]["comparisons"]
    assert 0.3 < cut["figures"]["fidelity"] < 0.9999
    assert [each["against"] for each in rows["captured"]["comparisons"]] == ["compressed", "original"]
    assert rows["captured"]["comparisons"][0]["figures"]["exactness"] > 0.9999
    assert rows["placed"]["comparisons"][0]["figures"]["fidelity"] > 0.97


def test_code_that_made_the_pruned_module_is_not_called_without_trust(reader, pruned, laconic):
    _, weights, data = reader
    code, rows, _ = read_ledger(laconic, pruned, weights, "--builder", BUILDER, "--data", data)
    assert code == 0
    assert "Give --trust" in rows["compressed"]["skipped"]


def test_without_the_pruned_module_its_steps_are_left_out(reader, pruned, laconic, monkeypatch, tmp_path):
    _, weights, data = reader
    monkeypatch.setenv(VARIABLE, str(tmp_path / "empty"))
    code, rows, _ = read_ledger(laconic, pruned, weights, "--builder", BUILDER, "--data", data, "--trust")
    assert code == 0
    for step in ("compressed", "captured"):
        assert rows[step]["passed"] is None
        assert "the module after prune.channels is not in the cache" in rows[step]["skipped"]
    assert [each["against"] for each in rows["placed"]["comparisons"]] == ["original"]


def test_a_damaged_module_in_the_cache_is_left_out(reader, pruned, cache, laconic, monkeypatch, tmp_path):
    _, weights, data = reader
    shutil.copytree(cache.folder, tmp_path / "cache")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    (found,) = (tmp_path / "cache").glob("stage-*/checkpoint/model.safetensors")
    found.write_bytes(found.read_bytes()[:-1])
    code, rows, _ = read_ledger(laconic, pruned, weights, "--builder", BUILDER, "--data", data, "--trust")
    assert code == 0
    assert "cannot be opened" in rows["compressed"]["skipped"]


def test_an_original_with_other_weights_misses_where_its_weights_are_read(reader, laconic, tmp_path):
    artifact, weights, data = reader
    other = digits.DigitsNet()
    torch.nn.init.normal_(other.head.weight)
    path = tmp_path / "other.safetensors"
    save_file(load_file(weights) | {"head.weight": other.head.weight.detach()}, path)
    code, rows, _ = read_ledger(laconic, artifact, path, "--builder", BUILDER, "--data", data)
    assert code == 3
    assert rows["placed"]["divergence"]["layer"] == "head"


def test_each_bad_use_is_one_sentence(reader, embedder, laconic, tmp_path):
    artifact, weights, _ = reader
    _, _, texts = embedder
    narrow = models.save_bert(tmp_path / "narrow", transformers.BertModel, hidden_size=16)
    own = ("--builder", BUILDER)
    for arguments, message in (
        ((artifact, "--ledger"), "Give --original SOURCE"),
        ((artifact, "--original", weights, *own), "--original, --builder is for --ledger and --adapter"),
        ((artifact, "--ledger", "--original", weights), "Give --builder package.module:factory"),
        ((artifact, "--ledger", "--original", tmp_path / "none", *own), "there is no"),
        ((artifact, "--ledger", "--original", weights, *own, "--data", texts), "texts.jsonl"),
        ((artifact, "--ledger", "--original", weights, *own, "--runtime", "torhc"), "torhc"),
        ((tmp_path, "--ledger", "--original", weights, *own), "not an artifact"),
        ((embedder[0], "--ledger", "--original", narrow), "its outputs are embedding: float32 [batch, 16], expected"),
        ((embedder[0], "--ledger", "--original", weights), "Give --builder package.module:factory"),
    ):
        code, out, err = laconic("verify", *arguments)
        assert (code, out) == (2, ""), arguments
        assert message in err
        assert len([line for line in err.splitlines() if line.startswith("laconic:")]) == 1
        assert "Traceback" not in err


def test_a_wrong_module_of_the_captured_graph_is_named(embedder, cache, tmp_path):
    """The exporter's folded factors, as of queries, are no divergence."""
    checkpoint = load_source(embedder[1])
    graph = capture_graph(CheckpointSource.of(checkpoint), cache)
    samples = [checkpoint.task.encode([text]) for text in checkpoint.task.examples(4)]
    found = find_captured_divergence(checkpoint, graph, samples)
    assert found.layer is None
    assert "agrees" in found.says
    for layer in graph.layers:
        if layer.kind == "Gather":
            continue
        checkpoint = load_source(embedder[1])
        with torch.no_grad():
            checkpoint.module.get_submodule(layer.module).weight.mul_(1.5)
        found = find_captured_divergence(checkpoint, graph, samples)
        assert found.layer == layer.module, found.says
        assert found.error > found.allowed


def test_a_graph_that_is_not_exact_is_followed_nevertheless(reader, folder, laconic, monkeypatch, tmp_path):
    artifact, weights, data = reader
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("export.capture.capture.PARITY", 0.0)
    code, rows, _ = read_ledger(laconic, artifact, weights, "--builder", BUILDER, "--data", data)
    assert code == 0
    assert rows["captured"]["comparisons"][0]["figures"]["exactness"] > 0.9999


def test_a_miss_without_a_wrong_layer_names_none(reader, laconic, monkeypatch):
    """Limits that nothing meets: each step misses, and says what there is to say."""
    artifact, weights, data = reader
    monkeypatch.setattr("laconic.models.source.EXACTNESS", 1.1)
    monkeypatch.setattr("export.parity.step_list.describe_tolerance", lambda tolerance: {"fidelity": 1.1})
    code, rows, err = read_ledger(laconic, artifact, weights, "--builder", BUILDER, "--data", data)
    assert code == 3
    assert "Failed: captured, placed, engine, HTTP" in err
    assert [rows[step]["divergence"]["layer"] for step in ("captured", "placed", "engine")] == [None] * 3
    assert "modules that could be compared agrees" in rows["captured"]["divergence"]["says"]
    assert "its quantization explains the error of each layer" in rows["placed"]["divergence"]["says"]
    assert "though each layer runs in the precision" in rows["engine"]["divergence"]["says"]


def test_an_onnx_file_is_followed_from_its_graph(reader, folder, cache, laconic, monkeypatch):
    _, weights, data = reader
    checkpoint = load_source(weights, builder=BUILDER)
    source = shutil.copy(capture_graph(CheckpointSource.of(checkpoint), cache).path, folder / "digits.onnx")
    stages = [{"quantize.weights": {}}]
    artifact = make_artifact(folder, "graph", source=str(source), data=str(data), engine_only="openvino", stages=stages)
    code, rows, _ = read_ledger(laconic, artifact, source, "--data", data)
    assert code == 0
    assert rows["original"]["ran"] == "onnxruntime, float32"
    monkeypatch.setattr("laconic.models.source.GraphSource.exactness", 1.1)
    code, rows, _ = read_ledger(laconic, artifact, source, "--data", data)
    assert code == 3
    assert rows["captured"]["divergence"]["says"] == "not bisected: an ONNX source has no modules"


def test_after_a_stage_that_teaches_the_original_binds_nothing(reader, laconic, monkeypatch):
    """The verdict of such an artifact compares with the model after that stage."""
    artifact, weights, data = reader
    monkeypatch.setattr("export.parity.step_list.find_teacher", lambda records, trust: "finetune")
    code, rows, _ = read_ledger(laconic, artifact, weights, "--builder", BUILDER, "--data", data)
    assert code == 0
    assert rows["engine"]["comparisons"][1]["required"] == {}
    records = [Record(stage=name, config={}, key="0") for name in ("finetune", "prune.channels")]
    assert find_teacher(records, trust=False) == "finetune"
    assert find_teacher(records[1:], trust=False) == ""


def test_a_placed_graph_of_another_model_is_not_bisected_and_layers_in_low_precision_are_named(reader, embedder, cache):
    checkpoint = load_source(embedder[1])
    graph = capture_graph(CheckpointSource.of(checkpoint), cache)
    found = find_placed_divergence(graph, reader[0] / MODEL, {}, [])
    assert found.layer is None
    assert "made from another captured graph" in found.says
    precision = {"a/MatMul": "int8", "b/MatMul": "float32", "c/Gather": "int8-weight"}
    kernels = [Kernel("a/MatMul", "brgemm_avx512_f32", "float32"), Kernel("b/MatMul", "brgemm_f32", "float32")]
    found = find_engine_divergence(precision, kernels)
    assert "1 of 2 layers run in float32 in place of int8 (a)" in found.says
    assert "does not report" in find_engine_divergence(precision, []).says
    assert "though each layer" in find_engine_divergence({"b/MatMul": "float32"}, kernels).says


def test_a_request_that_the_server_refuses_is_a_failure_of_the_step(tmp_path, own_process):
    artifact = Artifact.load(write_artifact(tmp_path / "twice.laconic"))
    x = np.array([[1, 2, 3]], np.float32)
    with http_session.open_served(artifact, "fake") as session:
        assert session.run({"x": x})["y"].tolist() == [[2, 4, 6]]
        with pytest.raises(RuntimeFailure, match=r"answered 400.*shape"):
            session.run({"x": x[:, :2]})
        assert session.run({"x": x})["y"].tolist() == [[2, 4, 6]], "the connection is still of use"
    with pytest.raises(RuntimeFailure, match="closed the connection"):
        session.run({"x": x})


def test_identical_means_every_bit_and_the_error_of_a_tensor_knows_infinities():
    zero = {"y": np.zeros((2, 3), np.float32)}
    assert is_identical(zero, {"y": np.zeros((2, 3), np.float32)}, 1)
    assert not is_identical(zero, {"y": -zero["y"]}, 1)
    assert not is_identical(zero, {"y": np.zeros((2, 3))}, 1)
    nan = {"y": np.full((1, 1), np.nan, np.float32)}
    assert is_identical(nan, nan, 0)
    error = ErrorSum()
    masked = np.array([3.0, 4.0, -np.inf, np.nan])
    error.add(masked, masked)
    assert error.relative == 0
    error.add(np.array([3.5]), np.array([3.0]))
    assert error.relative == pytest.approx(0.5 / np.sqrt(34))
    error.add(np.array([np.nan]), np.array([1.0]))
    assert error.relative == np.inf
    nothing = ErrorSum()
    nothing.add(np.array([1.0]), np.array([0.0]))
    assert nothing.relative == np.inf


def test_without_the_ledger_verify_loads_neither_torch_nor_onnx(tmp_path):
    path = write_artifact(tmp_path / "x.laconic")
    code = (
        "import sys; from laconic.cli import main\n"
        f"sys.argv = ['laconic', 'verify', {str(path)!r}]\n"
        "try:\n    main()\nexcept SystemExit as stopped:\n    assert not stopped.code\n"
        "assert not {'torch', 'onnx', 'transformers', 'export', 'serve.server'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
