"""Artifacts built again for other engines and targets, without samples; and tuned on the machine where they are."""

import copy
import json
import shutil
from collections import Counter

import digits
import models
import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from test_trust import ADDRESS, OTHERS, places, replaced

from compress.pipeline import compress
from export.lint.tensorrt_lint import lint_tensorrt
from export.rebuild import build
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.bench import tune
from laconic.artifacts.manifest import CALIBRATION, GRAPH, GRAPH_JSON, MANIFEST, MEASURED, REPORT
from laconic.errors import LaconicError, MissingPackage, SourceError, UnsupportedPrecision
from laconic.hashing import digest_file, seal, unseal
from laconic.progress import Steps
from laconic.recipes.recipe import Origin, Recipe

QUIET = Steps(quiet=True)


def run(trained, path, cache, **changes):
    weights, data = trained
    given = {"source": str(weights), "builder": "digits:DigitsNet", "data": str(data), **changes}
    return compress(Recipe.parse(given), path, cache=cache, steps=QUIET).artifact


@pytest.fixture(scope="module")
def made(trained, cache, tmp_path_factory):
    """The digits network in INT8 for one engine, with its float graph."""
    path = tmp_path_factory.mktemp("made") / "digits.laconic"
    return run(trained, path, cache, engine_only="openvino", keep_graph=True)


def weights_of(artifact):
    graph = onnx.load(artifact.model).graph
    return {each.name: numpy_helper.to_array(each) for each in graph.initializer if each.name.endswith("weight/int8")}


def test_the_calibration_and_the_graph_are_no_part_of_the_size(trained, cache, made, tmp_path):
    lean = run(trained, tmp_path / "lean.laconic", cache, engine_only="openvino")
    assert {GRAPH, GRAPH_JSON, CALIBRATION} <= set(made.manifest.files)
    assert not {GRAPH, GRAPH_JSON} & set(lean.manifest.files)
    assert lean.size == made.size
    assert lean.size < sum(file.size for file in lean.manifest.files.values())


def test_another_engine_gets_the_same_integers_and_answers_alike(made, cache, tmp_path):
    result = build(made.path, tmp_path / "b.laconic", changes={"engine_only": "onnxruntime"}, cache=cache, steps=QUIET)
    other = result.artifact
    assert result.missed == ()
    assert other.manifest.placement == "onnxruntime"
    assert other.manifest.precision == made.manifest.precision
    before, after = weights_of(made), weights_of(other)
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    task = made.task()
    inputs = task.encode(task.examples(16, seed=3))
    with made.open("openvino") as one, other.open("onnxruntime") as two:
        assert task.fidelity(one.run(inputs), two.run(inputs)).mean() > 0.97


def test_building_for_the_same_engine_gives_the_same_graph(made, cache, tmp_path):
    again = build(made.path, tmp_path / "b.laconic", changes={"engine_only": "openvino"}, cache=cache, steps=QUIET)
    assert again.artifact.model.read_bytes() == made.model.read_bytes()
    assert again.artifact.manifest.source == made.manifest.source
    assert [each.stage for each in again.artifact.manifest.history] == [each.stage for each in made.manifest.history]


@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
def test_a_gpu_artifact_made_without_one_is_proved_by_reference_execution_and_not_timed(made, cache, tmp_path, target):
    result = build(made.path, tmp_path / "g.laconic", changes={"target": target}, cache=cache, steps=QUIET)
    artifact = result.artifact
    if artifact.measured.timings:
        pytest.skip("this machine has an engine of the target")
    assert result.missed == ()
    assert artifact.manifest.target == target
    (drift, *_) = artifact.manifest.verdict.drift
    assert "reference execution" in drift.subject
    assert "float graph" in drift.against
    assert not any("engine" in each.subject for each in artifact.manifest.verdict.parity)
    assert "reference execution" in (artifact.path / REPORT).read_text(encoding="utf-8")
    with pytest.raises(MissingPackage, match=f"no engine of target '{target}' is on this machine"):
        artifact.choose()
    with pytest.raises(MissingPackage):
        tune(artifact.path, steps=QUIET)
    with artifact.open("onnxruntime") as session:  # slowly, on the CPU
        assert min(artifact.measure_golden_agreement(session, artifact.manifest.placements[0]).values()) > 0.9


def test_compressing_for_a_gpu_says_so_and_misses_a_goal_that_needs_timing(trained, cache, tmp_path):
    made = run(trained, tmp_path / "g.laconic", cache, target="cuda")
    if made.measured.timings:
        pytest.skip("this machine has an engine of the target")
    assert made.manifest.compute == "float16"
    assert set(made.manifest.precision.values()) == {"float16-weight"}
    weights, data = trained
    goal = {"source": str(weights), "builder": "digits:DigitsNet", "data": str(data), "target": "cuda"}
    recipe = Recipe.parse(goal | {"goal": {"max_latency": "1 s"}})
    result = compress(recipe, tmp_path / "h.laconic", cache=cache, steps=QUIET)
    assert any("was not measured" in each for each in result.missed)


def test_fp8_is_refused_where_no_engine_of_the_target_has_it(trained, cache, tmp_path):
    with pytest.raises(UnsupportedPrecision, match="--target tensorrt"):
        run(trained, tmp_path / "f.laconic", cache, stages=[{"quantize.static": {"dtype": "float8"}}])
    assert not (tmp_path / "f.laconic").exists()


def test_without_the_graph_its_own_source_is_captured_again_and_another_is_refused(trained, cache, tmp_path):
    weights, other = trained[0], tmp_path / "other.safetensors"
    lean = run(trained, tmp_path / "lean.laconic", cache, engine_only="openvino")
    with pytest.raises(SourceError, match="--original"):
        build(lean.path, tmp_path / "b.laconic", cache=cache, steps=QUIET)
    torch.manual_seed(1)
    save_file(digits.DigitsNet().state_dict(), other)
    original = Origin(source=str(other), builder="digits:DigitsNet")
    with pytest.raises(SourceError, match="another graph"):
        build(lean.path, tmp_path / "b.laconic", original=original, cache=cache, steps=QUIET)
    assert not (tmp_path / "b.laconic").exists()
    original = Origin(source=str(weights), builder="digits:DigitsNet")
    changes = {"engine_only": "openvino"}
    built = build(lean.path, tmp_path / "b.laconic", original=original, changes=changes, cache=cache, steps=QUIET)
    assert built.artifact.model.read_bytes() == lean.model.read_bytes()


def test_no_field_of_the_kept_graph_runs_or_reads_anything_else(made, cache, tmp_path):
    content = json.loads((made.path / GRAPH_JSON).read_text())
    content["layers"] = content["layers"][:2]
    for number, (where, hostile) in enumerate(
        (where, each) for where in places(content) for each in (ADDRESS, *OTHERS)
    ):
        folder = tmp_path / f"a{number % 7}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made.path, folder)
        changed = replaced(copy.deepcopy(content), where, hostile)
        (folder / GRAPH_JSON).write_text(json.dumps(changed))
        manifest = unseal(folder / MANIFEST)
        manifest["files"][GRAPH_JSON] = digest_file(folder / GRAPH_JSON).model_dump()
        (folder / MANIFEST).write_bytes(seal(manifest))
        with pytest.raises(LaconicError):
            build(folder, tmp_path / "b.laconic", cache=cache, steps=QUIET)


def test_tuning_replaces_the_timings_and_nothing_else(made, tmp_path):
    path = tmp_path / "digits.laconic"
    shutil.copytree(made.path, path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with made.open("openvino") as original:
        tuned = tune(path, original, steps=QUIET)
    assert {time.engine for time in tuned.measured.timings} == {"original", "openvino, float32"}
    assert tuned.measured.knee >= 1
    assert {name for name, content in before.items() if (path / name).read_bytes() != content} == {MEASURED}
    alone = tune(path, steps=QUIET)
    assert {time.engine for time in alone.measured.timings} == {"openvino, float32"}
    assert np.isfinite([time.seconds for time in alone.measured.timings]).all()


def test_the_commands_build_and_tune(laconic, made, tmp_path, monkeypatch):
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "b.laconic"
    code, shown, _ = laconic("build", made.path, "-o", out, "--engine-only", "onnxruntime", "--json")
    assert code == 0
    assert json.loads(shown)["placement"] == "onnxruntime"
    code, shown, _ = laconic("tune", out, "--json")
    assert code == 0
    assert {each["batch"] for each in json.loads(shown)} == {1, 2, 4, 8, 16, 32}
    assert Artifact.load(out).measured.timings
    code, _, error = laconic("build", tmp_path / "none", "-o", tmp_path / "c.laconic")
    assert code == 2
    assert "holds no manifest.json" in error


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A causal language model of random weights, wide enough for blocks of 128 inputs, and texts."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=models.TEXT["vocab_size"], max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 20  # distributions that are told apart by more than the noise of 8 bits
    models.save_transformer(folder / "source", model)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(models.WORDS, rng.integers(3, 9))) for _ in range(100)]
    (folder / "texts.txt").write_text("\n".join(texts))
    return folder


@pytest.mark.parametrize(
    ("stage", "precision", "least"),
    [
        ({"quantize.static": {"dtype": "float8"}}, "float8", 0.97),
        ({"quantize.gptq": {"bits": 4, "group_size": 128}}, "int4-weight", 0.9),
    ],
)
def test_fp8_and_int4_are_proved_on_a_causal_language_model(llama, cache, tmp_path, stage, precision, least):
    given = {"source": str(llama / "source"), "task": "text-generation", "data": str(llama / "texts.txt")}
    recipe = Recipe.parse(given | {"target": "tensorrt", "stages": [stage], "goal": {"fidelity": least}})
    result = compress(recipe, tmp_path / "lm.laconic", cache=cache, steps=QUIET)
    assert result.missed == ()
    counts = Counter(result.artifact.manifest.precision.values())
    assert counts[precision] >= 6
    assert [finding.message for finding in lint_tensorrt(result.artifact.model) if finding.severity == "error"] == []
    assert "By reference execution" in (result.artifact.path / REPORT).read_text()


def build_perceptron(width):
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))


def test_a_module_of_ones_own_is_built_again_with_the_arguments_and_inputs_it_was_compressed_with(
    laconic, tmp_path, monkeypatch
):
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    source, builder = tmp_path / "net.safetensors", "test_rebuild:build_perceptron"
    torch.manual_seed(0)
    save_file(build_perceptron(24).state_dict(), source)
    np.savez(tmp_path / "d.npz", input=np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"builder: {builder}\narguments: {{width: 24}}\n")
    made = tmp_path / "net.laconic"
    given = ("--recipe", recipe, "--data", tmp_path / "d.npz", "--engine-only", "openvino", "--trust")
    assert laconic("compress", source, *given, "-o", made)[0] == 0
    again = ("--original", source, "--builder", builder, "--engine-only", "onnxruntime", "-o", tmp_path / "again")
    code, _, err = laconic("build", made, *again)
    assert code == 0, err


def test_an_onnx_file_is_opened_with_the_sizes_and_constants_that_the_artifact_knows(tmp_path, monkeypatch, laconic):
    """A pyramid whose sides must be multiples of 4, an input with one value, and a state whose batch is not first."""
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    kernels = {name: rng.normal(size=(8, size, 3, 3)).astype(np.float32) / 8 for name, size in (("v", 3), ("w", 8))}
    scales = {"factors": np.array([1, 1, 4, 4], np.float32), "u": kernels["w"] * 0.5}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], pads=[1] * 4),
        helper.make_node("Conv", ["a", "w"], ["b"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Conv", ["b", "u"], ["c"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Resize", ["c", "", "factors"], ["d"], mode="nearest"),
        helper.make_node("Add", ["a", "d"], ["e"]),
        helper.make_node("Mul", ["e", "gain"], ["y"]),
        helper.make_node("Mul", ["state", "gain"], ["state_out"]),
    ]
    shapes = {
        "x": ["N", 3, "h", "w"],
        "state": [2, "N", 8],
        "gain": [],
        "y": ["N", 8, "h", "w"],
        "state_out": [2, "N", 8],
    }
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    initializers = [numpy_helper.from_array(array, name) for name, array in {**kernels, **scales}.items()]
    graph = helper.make_graph(nodes, "g", infos[:3], infos[3:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "p.onnx")
    images = [rng.normal(size=(3, side, side)).astype(np.float32) for side in (16, 16, 24, 32) * 30]
    np.savez(
        tmp_path / "d.npz",
        x=np.concatenate([image.ravel() for image in images]),
        x_shapes=np.array([image.shape for image in images]),
        state=rng.normal(size=(120, 2, 8)).astype(np.float32),
        gain=np.full(120, 0.5, np.float32),
    )
    made, again = tmp_path / "p.laconic", tmp_path / "again.laconic"
    options = ("--data", tmp_path / "d.npz", "--engine-only", "onnxruntime", "-o", made)
    code, _, err = laconic("compress", tmp_path / "p.onnx", *options)
    assert code == 0, err
    assert Artifact.load(made).manifest.inputs[0].bounds == {"h": (16, 32), "w": (16, 32)}
    code, _, err = laconic("build", made, "--original", tmp_path / "p.onnx", "--engine-only", "openvino", "-o", again)
    assert code == 0, err
    assert Artifact.load(again).manifest.inputs == Artifact.load(made).manifest.inputs
    options = ("--original", tmp_path / "p.onnx", "--data", tmp_path / "d.npz", "-o", tmp_path / "proven.laconic")
    code, _, err = laconic("build", made, *options)
    assert code == 0, err
