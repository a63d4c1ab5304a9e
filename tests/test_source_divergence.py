"""The original of an ONNX source is the file that was given: nothing that the import does may change its answers."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.pipeline import compress
from export.capture.onnx_source import import_onnx
from export.capture.source_divergence import find_source_divergence
from export.passes.optimize import optimize
from laconic.arrays import Array
from laconic.cache import Cache
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.runtimes.onnxruntime import OnnxRuntime


def save_log_energy(path, epsilon=1e-10, batch="N"):
    """log(x * x + epsilon) before a linear layer, the front end of audio networks."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array((rng.normal(size=(24, 4)) * 0.1).astype(np.float32), "w"),
        numpy_helper.from_array(np.array(epsilon, np.float32), "epsilon"),
    ]
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["energy"], name="square"),
        helper.make_node("Add", ["energy", "epsilon"], ["floor"], name="floor"),
        helper.make_node("Log", ["floor"], ["level"], name="log"),
        helper.make_node("MatMul", ["level", "w"], ["y"], name="layer"),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, size]) for name, size in (("x", 24), ("y", 4))
    ]
    graph = helper.make_graph(nodes, "energy", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def quiet_samples(count=300):
    """Sounds of all levels, with digital silence."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 24)) * 10.0 ** rng.uniform(-8, 0, size=(count, 24))
    x[:, ::7] = 0
    return x.astype(np.float32)


def scalar_graph(operator: str, number: float) -> ir.Model:
    """x and a scalar, through one operator."""
    constant = numpy_helper.from_array(np.array(number, np.float32), "c")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(operator, ["x", "c"], ["y"])], "g", ends[:1], ends[1:], [constant])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))


def run_model(model: ir.Model, x: Array, path) -> Array:
    ir.save(model, path)
    with OnnxRuntime().open(path, optimize=False) as session:
        return session.run({"x": x})["y"]


@pytest.mark.parametrize(
    ("operator", "number"), [("Add", 1e-10), ("Sub", -3e-9), ("Mul", 1.000009), ("Div", 0.999992), ("Add", -1e-8)]
)
def test_a_number_that_is_nearly_neutral_keeps_its_effect(operator, number, tmp_path):
    x = np.array([[0.0, 1e-9, 3.0]], np.float32)
    model = scalar_graph(operator, number)
    expected = run_model(model, x, tmp_path / "before.onnx")
    optimize(model)
    assert [node.op_type for node in model.graph if node.op_type == operator]
    found = run_model(model, x, tmp_path / "after.onnx")
    assert np.array_equal(found, expected)
    assert found.shape == (1, 3)


@pytest.mark.parametrize(("operator", "number"), [("Add", 0.0), ("Sub", 0.0), ("Mul", 1.0), ("Div", 1.0)])
def test_what_has_no_effect_is_removed(operator, number):
    model = scalar_graph(operator, number)
    optimize(model)
    assert not [node for node in model.graph if node.op_type == operator]


@pytest.mark.parametrize("batch", ["N", 1])
def test_the_imported_graph_answers_silence_as_the_file_does(batch, tmp_path):
    file = save_log_energy(tmp_path / "energy.onnx", batch=batch)
    graph = import_onnx(file, tmp_path / "graph").graph
    x = quiet_samples(8)
    with OnnxRuntime().open(file) as source, OnnxRuntime().open(graph.path) as imported:
        rows = [source.run({"x": x[row : row + 1]})["y"] for row in range(8)]
        assert np.concatenate(rows) == pytest.approx(imported.run({"x": x})["y"], abs=1e-5)


def test_the_first_node_that_differs_is_named(tmp_path):
    file = save_log_energy(tmp_path / "energy.onnx")
    graph = import_onnx(file, tmp_path / "graph").graph
    rows = [{"x": row[None]} for row in quiet_samples(4)]
    assert find_source_divergence(file, graph.path, rows) == ""
    changed = onnx.load(graph.path)
    for tensor in changed.graph.initializer:
        if tensor.name.startswith("epsilon"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 0 + np.float32(1e-3), tensor.name))
    onnx.save(changed, tmp_path / "changed.onnx")
    assert find_source_divergence(file, tmp_path / "changed.onnx", rows) == "floor"


def test_a_verdict_compares_with_the_file_and_names_where_its_graph_differs(tmp_path, monkeypatch):
    """The optimizer that takes 1e-10 for 0 is put back, to have a fault that only the samples show."""
    from onnxscript import optimizer

    monkeypatch.setattr("export.capture.onnx_source.optimize", optimizer.optimize)
    monkeypatch.setattr("export.capture.onnx_source.PARITY", 1.0)
    monkeypatch.setattr("laconic.models.source.GraphSource.exactness", 1 - 1e-4)
    file = save_log_energy(tmp_path / "energy.onnx")
    samples = quiet_samples()
    samples[samples == 0] = 1e-6  # of which the logarithm is a number, and another one
    np.savez(tmp_path / "x.npz", x=samples)
    given = {"source": str(file), "data": str(tmp_path / "x.npz"), "runtimes": ["onnxruntime"], "stages": []}
    result = compress(
        Recipe.parse(given), tmp_path / "a.laconic", cache=Cache(tmp_path / "cache"), steps=Steps(quiet=True)
    )
    assert result.artifact.manifest.verdict.state == "failed"
    assert any(
        sentence.startswith("float graph, from node 'log' on, against source: exactness is")
        for sentence in result.missed
    )
    assert any("artifact against original: fidelity" in sentence for sentence in result.missed)


def test_an_original_that_answers_with_nan_is_named_by_its_row(tmp_path):
    from laconic.errors import DataError

    file = save_log_energy(tmp_path / "energy.onnx", epsilon=0.0)
    rows = [json.dumps({"inputs": {"x": [0.0 if row == 91 else 1.0 + row] * 24}}) + "\n" for row in range(100)]
    (tmp_path / "seen.jsonl").write_text("".join(rows[:50]))
    (tmp_path / "x.jsonl").write_text("".join(rows[50:]))
    data = {"calibrate": str(tmp_path / "seen.jsonl"), "evaluate": str(tmp_path / "x.jsonl")}
    with pytest.raises(DataError, match=r"the original itself answers row 42 of x\.jsonl with NaN or infinity"):
        compress(
            Recipe.parse({"source": str(file), "data": data, "runtimes": ["onnxruntime"]}),
            tmp_path / "a.laconic",
            cache=Cache(tmp_path / "c"),
            steps=Steps(quiet=True),
        )
