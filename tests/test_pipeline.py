"""From a source to an artifact, for real: small models, every engine, nothing replaced."""

import json
import shutil
from pathlib import Path

import digits
import models
import numpy as np
import onnx
import pytest
from contexts import Interrupted, Messages

from compress.pipeline import compress
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.inspection import count_kernels, verify
from laconic.artifacts.manifest import MANIFEST, MEASURED, MODEL, REPORT
from laconic.cache import Cache
from laconic.errors import DataError, UnprovenArtifact, UsageError
from laconic.hardware import this_machine
from laconic.hashing import digest_file, seal, unseal
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe

ENGINES = ("openvino", "onnxruntime")
STEPS = (
    "load the source and the samples",
    "capture the graph",
    "run the original model",
    "calibrate",
    "round the weights",
    "build the candidates",
    "time the candidates",
    "validate",
    "measure latency and throughput",
)


@pytest.fixture(scope="module")
def reads_digits(trained, cache, tmp_path_factory):
    """The artifact of the digits network."""
    return run(trained, tmp_path_factory.mktemp("digits") / "digits.laconic", cache).artifact


@pytest.fixture(scope="module")
def two_caches(tmp_path_factory):
    """Caches of two machines, which have nothing in common; each engine finds the graph there."""
    folder = tmp_path_factory.mktemp("caches")
    return Cache(folder / "one"), Cache(folder / "two")


def recipe(trained, **changes):
    weights, data = trained
    return Recipe.parse({"source": str(weights), "builder": "digits:DigitsNet", "data": str(data), **changes})


def run(trained, path, cache, steps=None, **changes):
    return compress(recipe(trained, **changes), path, cache=cache, steps=steps or Steps(quiet=True))


def content(path):
    """What must be the same from run to run."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name not in (MEASURED, REPORT)}


def left_over(path):
    """What lies beside an artifact that should not."""
    return sorted(entry.name for entry in path.parent.iterdir() if entry != path)


def test_a_network_in_int8_reads_digits_as_well_as_before_and_its_figures_are_what_a_run_over_the_samples_finds(
    reads_digits, trained
):
    (drift,) = reads_digits.manifest.verdict.drift
    assert reads_digits.manifest.verdict.failures == []
    assert drift.figures["metric_original"] > 0.9
    assert abs(drift.figures["metric_change"]) <= 0.005
    assert "int8" in set(reads_digits.manifest.precision.values())
    assert reads_digits.size < 0.75 * reads_digits.measured.original_size
    images, labels = digits.samples()
    with reads_digits.open() as session:
        found = next(iter(session.run({"image": images[1000:]}).values())).argmax(axis=1)
    (drift,) = reads_digits.manifest.verdict.drift
    assert (found == labels[1000:]).mean() == pytest.approx(drift.figures["metric"], abs=0.03)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gives_its_golden_answers(reads_digits, engine):
    with reads_digits.open(engine) as session:
        agreement = reads_digits.measure_golden_agreement(session, reads_digits.manifest.placements[0])
    assert all(each > 0.95 for each in agreement.values())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("factor", [0.5, 2])
def test_one_wrong_weight_scale_of_the_first_convolution_is_caught(reads_digits, engine, factor, tmp_path):
    path = Path(shutil.copytree(reads_digits.path, tmp_path / "digits.laconic"))
    model = onnx.load(path / MODEL)
    initializers = {each.name: each for each in model.graph.initializer}
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    dequantize = next(node for node in model.graph.node if node.output[0] == first.input[1])
    scale = initializers[dequantize.input[1]]
    numbers = onnx.numpy_helper.to_array(scale) * np.where(np.arange(8) == 2, factor, 1).astype(np.float32)
    scale.CopyFrom(onnx.numpy_helper.from_array(numbers, scale.name))
    onnx.save(model, path / MODEL)
    digest = digest_file(path / MODEL).model_dump()
    manifest = unseal(path / MANIFEST)
    (path / MANIFEST).write_bytes(seal(manifest | {"files": manifest["files"] | {MODEL: digest}}))
    with pytest.raises(UnprovenArtifact, match=r"agreement of 'output' is 0\.[0-9]+, expected at least 0\.9"):
        Artifact.load(path).open(engine)


def test_it_passes_every_check_runs_in_int8_and_its_report_shows_its_layers_and_nothing_of_the_disk(
    reads_digits, trained
):
    assert [check for check in verify(reads_digits.path) if not check.passed] == []
    found = count_kernels(reads_digits)
    assert found["engine"].startswith(reads_digits.manifest.placement)
    assert set(found["layers"]["int8"]) == {"int8"}
    assert "float32" not in found["layers"] or set(found["layers"]["float32"]) <= {"float32", "bfloat16", "not told"}
    page = (reads_digits.path / REPORT).read_text(encoding="utf-8")
    for text in ("stem.<wbr/>0", "head", "digits.npz", "Conv", "build the candidates"):
        assert text in page
    assert str(reads_digits.path.parent) not in page
    for name, data in content(reads_digits.path).items():
        assert str(trained[0].parent).encode() not in data, name
        assert str(Path.cwd()).encode() not in data, name


def test_the_steps_are_known(reads_digits):
    stages = reads_digits.measured.stages
    steps = (*STEPS, "choose the range of the weights") if this_machine().int8_saturates else STEPS
    assert len(stages) == len(steps)
    assert all(title.startswith(steps) for title in stages)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_recipe_restricts_the_engines(trained, engine, cache, tmp_path):
    # One arithmetic alone, since which of several is fastest is for the clock to say.
    stage = {"quantize.weights": {}} if engine == "openvino" else {"quantize.static": {"mixed_precision": False}}
    made = run(trained, tmp_path / "made.laconic", cache, runtimes=[engine], stages=[stage]).artifact
    assert made.manifest.placement == engine


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_given_alone_is_built_without_a_race_and_gives_the_same_bytes(
    trained, engine, tmp_path, two_caches
):
    first, second = (
        run(trained, tmp_path / f"{cache.folder.name}.laconic", cache, engine_only=engine).artifact
        for cache in two_caches
    )
    assert (first.manifest.placement, first.manifest.compute) == (engine, "float32")
    assert content(second.path) == content(first.path)
    assert not list(two_caches[0].folder.glob("raced-*"))


def test_a_run_interrupted_in_any_step_leaves_nothing_and_goes_on_from_there(trained, tmp_path):
    cache = Cache(tmp_path / "cache")
    path = tmp_path / "out" / "digits.laconic"
    path.parent.mkdir()
    for title in STEPS:
        with pytest.raises(KeyboardInterrupt):
            run(trained, path, cache, Interrupted(title))
        assert not path.exists()
        assert left_over(path) == []
        assert not [entry for entry in cache.folder.rglob("*") if "partial" in entry.name]
    steps = Steps(quiet=True)
    made = run(trained, path, cache, steps).artifact
    assert made.manifest.verdict.failures == []
    assert left_over(path) == []
    # What is decided once is looked up, not done again.
    assert not {title for title in steps.seconds if title.startswith(("calibrate", "time"))}


def test_a_missed_goal_is_said_and_the_best_result_is_kept(trained, cache, tmp_path):
    goal = {"max_size": "1 kB", "max_latency": "1 ns"}
    result = run(trained, tmp_path / "small.laconic", cache, goal=goal)
    assert ["size" in each or "latency" in each for each in result.missed] == [True, True]
    assert Artifact.load(tmp_path / "small.laconic").manifest.verdict.failures == []


def test_a_fidelity_that_int8_cannot_reach_gives_bits_back(trained, cache, tmp_path, reads_digits):
    (drift,) = reads_digits.manifest.verdict.drift
    wanted = 1 - (1 - drift.figures["fidelity"]) / 50
    result = run(trained, tmp_path / "exact.laconic", cache, goal={"fidelity": wanted}, runtimes=["onnxruntime"])
    assert result.missed == ()
    assert "int8" not in set(result.artifact.manifest.precision.values())
    assert result.artifact.size > reads_digits.size


def test_a_goal_that_every_candidate_misses_while_it_is_chosen_is_said(trained, cache, tmp_path):
    steps, stages = Messages(), [{"quantize.static": {"mixed_precision": False}}]
    goal = {"fidelity": 0.9999999}
    run(trained, tmp_path / "a.laconic", cache, steps, stages=stages, goal=goal, runtimes=["onnxruntime"])
    assert any("no candidate meets the goal" in each for each in steps.warnings)


def test_sensitivity_is_measured_and_reported_where_it_is_asked_for(trained, cache, tmp_path, reads_digits):
    assert "sensitivity" not in (reads_digits.path / REPORT).read_text(encoding="utf-8")
    stages = [{"quantize.static": {"measure_sensitivity": True}}]
    artifact = run(trained, tmp_path / "a.laconic", cache, stages=stages, runtimes=["onnxruntime"]).artifact
    assert "Sensitivity is the fidelity lost" in (artifact.path / REPORT).read_text(encoding="utf-8")
    assert "measure each layer's sensitivity" in artifact.measured.stages


def test_weights_too_large_for_one_file_are_part_of_the_artifact(trained, cache, tmp_path, monkeypatch, reads_digits):
    monkeypatch.setattr("export.capture.model_file.LARGEST", 1000)
    artifact = run(trained, tmp_path / "large.laconic", cache, runtimes=["onnxruntime"]).artifact
    assert "model.data" in artifact.manifest.files
    assert [check for check in verify(artifact.path) if not check.passed] == []


def test_an_earlier_artifact_is_replaced_whole(trained, cache, tmp_path, reads_digits):
    path = tmp_path / "digits.laconic"
    shutil.copytree(reads_digits.path, path)
    (path / "stale.json").write_text("{}")
    run(trained, path, cache, stages=[])
    assert not (path / "stale.json").exists()
    assert set(Artifact.load(path).manifest.precision.values()) == {"float32"}
    assert left_over(path) == []


def test_a_folder_that_is_no_artifact_is_left_alone_and_quantization_asks_for_samples(trained, cache, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not be overwritten"):
        run(trained, tmp_path / "thesis", cache)
    assert [entry.name for entry in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]
    given = recipe(trained).model_copy(update={"data": Recipe.model_fields["data"].default})
    with pytest.raises(DataError, match="--data"):
        compress(given, tmp_path / "out", cache=cache, steps=Steps(quiet=True))
    assert left_over(tmp_path / "thesis") == []


def test_without_samples_a_full_precision_artifact_says_that_they_were_made_up(trained, cache, tmp_path):
    given = recipe(trained, stages=[], runtimes=["onnxruntime"]).model_copy(
        update={"data": Recipe.model_fields["data"].default}
    )
    artifact = compress(given, tmp_path / "plain.laconic", cache=cache, steps=Steps(quiet=True)).artifact
    (drift,) = artifact.manifest.verdict.drift
    assert artifact.manifest.verdict.failures == []
    assert drift.against == "original, on made-up samples"
    assert drift.figures["fidelity"] == 1
    assert artifact.manifest.data == {}
    assert "made-up inputs" in (artifact.path / REPORT).read_text(encoding="utf-8")


def test_a_graph_of_another_framework_is_a_source(trained, cache, tmp_path):
    plain = run(trained, tmp_path / "plain.laconic", cache, stages=[], runtimes=["onnxruntime"]).artifact
    source = tmp_path / "digits.onnx"
    shutil.copy(plain.path / MODEL, source)
    fixed = {"quantize.static": {"mixed_precision": False}}
    given = Recipe.parse(
        {"source": str(source), "data": str(trained[1]), "runtimes": ["onnxruntime"], "stages": [fixed]}
    )
    artifact = compress(given, tmp_path / "out.laconic", cache=cache, steps=Steps(quiet=True)).artifact
    assert artifact.manifest.verdict.failures == []
    assert artifact.manifest.source["kind"] == "onnx"
    assert set(artifact.manifest.precision.values()) == {"int8"}
    assert all(comparison.against != "checkpoint" for comparison in artifact.manifest.verdict.parity)


def test_a_classifier_of_texts_with_labels(cache, tmp_path):
    source = models.save_bert(tmp_path / "bert", num_hidden_layers=1)
    rng = np.random.default_rng(0)
    words = models.WORDS
    rows = [
        {"text": " ".join(rng.choice(words, rng.integers(3, 12))), "label": ["no", "maybe", "yes"][rng.integers(3)]}
        for _ in range(120)
    ]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = Recipe.parse({"source": str(source), "data": {"calibrate": str(data)}, "runtimes": ["openvino"]})
    result = compress(given, tmp_path / "bert.laconic", cache=cache, steps=Steps(quiet=True))
    manifest = result.artifact.manifest
    assert manifest.task == "text-classification"
    assert manifest.verdict.failures == []
    # Answers of random weights hardly differ, so that some layers must leave INT8 for them to be told apart.
    assert set(manifest.precision.values()) <= {"int8", "int8-weight", "float16-weight"}
    assert "metric" in manifest.verdict.drift[0].figures
    with result.artifact.open() as session:
        task = result.artifact.task()
        samples = [task.parse("the model answers")]
        (answer,) = task.decode(session.run(task.encode(samples)), samples)
    assert answer["label"] in ("no", "maybe", "yes")
