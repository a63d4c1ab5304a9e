"""An artifact of an ONNX file stands beside ONNX Runtime's dynamic quantization of it, and says what it gave up."""

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

from compress.pipeline import compress
from export.candidates import dynamic_baseline
from laconic.artifacts.gain import list_gains
from laconic.artifacts.inspection import summarize
from laconic.cache import Cache
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.runtimes.onnxruntime import OrtSession
from laconic.runtimes.openvino import OvSession

WIDTH, ROWS = 48, 60


def write_file(path):
    """Write a network of a few layers; returns samples for it."""
    rng = np.random.default_rng(0)

    def weight(name, *shape):
        return nh.from_array((rng.normal(size=shape) / np.sqrt(WIDTH)).astype(np.float32), name)

    names = ["a", "b", "c"]
    nodes, tensors = [], [weight(f"w_{name}", WIDTH, WIDTH) for name in names]
    last = "x"
    for name in names:
        nodes += [h.make_node("MatMul", [last, f"w_{name}"], [f"m_{name}"]), h.make_node("Tanh", [f"m_{name}"], [name])]
        last = name
    inputs = [h.make_tensor_value_info("x", T.FLOAT, ["batch", WIDTH])]
    outputs = [h.make_tensor_value_info(last, T.FLOAT, ["batch", WIDTH])]
    graph = h.make_graph(nodes, "network", inputs, outputs, tensors)
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), path)
    return rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def compress_file(folder, samples, **settings):
    np.savez(folder / "samples.npz", x=samples)
    recipe = Recipe.default(
        str(folder / "model.onnx"), data=str(folder / "samples.npz"), engine_only="onnxruntime", **settings
    )
    return compress(recipe, folder / "made.laconic", steps=Steps(quiet=True), cache=Cache(folder / "cache")).artifact


def test_the_table_and_the_summary_have_a_row_for_dynamic_quantization(tmp_path, caplog):
    artifact = compress_file(tmp_path, write_file(tmp_path / "model.onnx"))
    assert [each for each in caplog.records if each.levelname != "DEBUG"] == []
    dynamic = artifact.measured.dynamic
    assert dynamic.samples == artifact.manifest.verdict.drift[0].samples
    assert 0 < dynamic.size < artifact.measured.original_size
    assert 0.9 < dynamic.fidelity <= 1
    assert dynamic.speed > 0
    row = list(list_gains(artifact.manifest, artifact.measured, ""))[-1]
    assert (row.figure, row.original) == ("ONNX Runtime dynamic INT8", "")
    assert row.change.startswith("fidelity 0.9")
    assert summarize(artifact)["measured"]["dynamic"]["size"] == dynamic.size
    assert b"ONNX Runtime dynamic INT8" in artifact.read_report()


def test_an_artifact_that_is_larger_says_why(tmp_path):
    kept = [{"quantize.static": {"keep": ["*"]}}]
    artifact = compress_file(tmp_path, write_file(tmp_path / "model.onnx"), stages=kept)
    dynamic = artifact.measured.dynamic
    assert dynamic.size < artifact.manifest.served_size
    (sentence,) = [each for each in dynamic.gave_up if each.startswith("larger than dynamic INT8")]
    assert "32-bit weights of layers, which the goal or the recipe keeps so" in sentence
    assert b"The artifact is larger than dynamic INT8" in artifact.read_report()


def test_what_the_other_tool_cannot_quantize_is_no_failure(tmp_path, monkeypatch):
    def refuse(model, path):
        raise ValueError("Expected 'w' to be an initializer")  # as for Conv whose weights paddle2onnx writes as nodes

    monkeypatch.setattr(dynamic_baseline, "quantize_dynamic", refuse)
    artifact = compress_file(tmp_path, write_file(tmp_path / "model.onnx"))
    assert artifact.measured.dynamic.unavailable == "quantize_dynamic fails (ValueError)"
    row = list(list_gains(artifact.manifest, artifact.measured, ""))[-1]
    assert (row.artifact, row.change) == ("-", "not available")


def test_an_artifact_that_is_not_quantized_is_not_compared(tmp_path):
    assert compress_file(tmp_path, write_file(tmp_path / "model.onnx"), stages=[]).measured.dynamic is None


@pytest.fixture
def rows(monkeypatch):
    """Count the rows that each engine runs, but for those that are timed, which are copies of one sample."""
    counts = Counter()
    for kind in (OrtSession, OvSession):

        def run(self, inputs, run=kind.run, name=kind.__name__):
            array = next(iter(inputs.values()))
            if len(array) == 1 or np.ptp(array, axis=0).any():
                counts[name] += len(array)
            return run(self, inputs)

        monkeypatch.setattr(kind, "run", run)
    return counts


def test_the_engines_run_each_sample_a_bounded_number_of_times(tmp_path, rows):
    """By what is run, since clocks depend on what else the machine does."""
    compress_file(tmp_path, write_file(tmp_path / "model.onnx"))
    assert rows["OvSession"] == 0
    assert rows.total() < 8 * ROWS
