"""PyTorch as an engine for GPUs, on the CPU: the graphs that are typed for it, and the order of captures and replays.

What PyTorch does on a device is not shown.
"""

from contextlib import nullcontext

import captured
import numpy as np
import pytest
import torch

from export.build import EngineOption
from export.reference import open_reference
from laconic.errors import MissingPackage, RecipeError, RuntimeFailure
from laconic.metrics import cosine
from laconic.quantization.plan import Plan
from laconic.recipes.recipe import Recipe
from laconic.runtimes import torch_cuda
from laconic.runtimes.fallbacks import find_reason
from laconic.runtimes.torch_cuda import CapturedProgram, TorchCuda

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch's build for CUDA is installed")


@pytest.fixture
def engine(monkeypatch):
    """The engine with the CPU as its device, where a recorded run is made again when it is replayed."""
    counts = {"captured": 0, "replayed": 0, "released": 0}

    def record(program, inputs, stream):
        outputs = program.run(inputs)
        counts["captured"] += 1

        def replay():
            counts["replayed"] += 1
            for held, found in zip(outputs, program.run(inputs), strict=True):
                held.copy_(found)

        def release():
            counts["released"] += 1

        return CapturedProgram(inputs, outputs, replay, release)

    monkeypatch.setattr(torch_cuda, "DEVICE", "cpu")
    monkeypatch.setattr(torch_cuda, "record", record)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    made = TorchCuda()
    made.counts = counts
    return made


def build(graph, compute, path, precision="int8"):
    plan = Plan({layer.node: precision for layer in graph.layers})
    EngineOption("torch-cuda", compute, reference=True).build(graph, plan, path)
    return path


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["bert", "residual", "vit"])
def test_a_typed_graph_computes_nearly_what_reference_execution_does(engine, shared, tmp_path, name, compute):
    checkpoint, graph = captured.open_captured(shared, name)
    path = build(graph, compute, tmp_path / "model.onnx")
    with engine.open_for_trial(path, compute=compute) as session, open_reference(path) as reference:
        for rows, length in ((1, 5), (3, 9)):
            given = captured.inputs(checkpoint, rows, length, rows)
            expected, found = reference.run(given), session.run(given)
            assert list(found) == list(expected)
            for output, array in expected.items():
                assert found[output].dtype == np.float32
                assert cosine(array, found[output]).min() > 0.999
        assert {kernel.precision for kernel in session.kernels()} == {compute}


def test_shapes_that_come_again_are_replayed_and_answers_stay(engine, shared, tmp_path):
    checkpoint, graph = captured.open_captured(shared, "tied")
    path = build(graph, "float16", tmp_path / "model.onnx")
    kept = []
    with engine.open_for_trial(path) as session, open_reference(path) as reference:
        for number in range(24):
            given = captured.inputs(checkpoint, number % 6 + 1, 4, number)
            kept.append((session.run(given), reference.run(given)))
    assert engine.counts["captured"] == 6
    assert engine.counts["replayed"] == 4, "the fifth shape and the sixth displaced the first and the second"
    with engine.open_for_trial(path) as session, open_reference(path) as reference:
        for number in range(24):
            given = captured.inputs(checkpoint, number % 2 + 1, 4, number)
            kept.append((session.run(given), reference.run(given)))
    assert engine.counts["replayed"] == 4 + 24 - 2 * 3
    assert engine.counts["released"] == engine.counts["captured"] == 8
    for found, expected in kept:
        for name, array in expected.items():
            assert cosine(array, found[name]).min() > 0.999


def test_a_run_that_cannot_be_captured_is_made_without_a_graph(engine, shared, tmp_path, monkeypatch, caplog):
    def refuse(program, inputs, stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch_cuda, "record", refuse)
    checkpoint, graph = captured.open_captured(shared, "tied")
    given = captured.inputs(checkpoint, 2, 4, 0)
    with engine.open_for_trial(build(graph, "float16", tmp_path / "model.onnx")) as session:
        answers = [session.run(given) for _ in range(6)]
    assert all(np.array_equal(each[name], array) for each in answers for name, array in answers[0].items())
    assert len(caplog.records) == 1


def test_inputs_that_do_not_fit_are_refused_by_name(engine, shared, tmp_path):
    _, graph = captured.open_captured(shared, "tied")
    path = build(graph, "float16", tmp_path / "model.onnx")
    with engine.open_for_trial(path) as session, pytest.raises(RuntimeFailure, match="the inputs are"):
        session.run({})


def test_pytorch_for_cpus_is_refused():
    with pytest.raises(MissingPackage, match="the one for CPUs"):
        TorchCuda()


def test_it_is_tried_only_where_it_is_named_and_says_why_it_runs_no_int8():
    assert Recipe.default("m", target="cuda", engine_only="torch-cuda").engines == ("torch-cuda",)
    assert Recipe.default("m", target="tensorrt", runtimes=["tensorrt", "torch-cuda"]).engines[1] == "torch-cuda"
    with pytest.raises(RecipeError, match="'torch-cuda' is not an engine of target 'cpu'"):
        Recipe.default("m", engine_only="torch-cuda")
    assert "torch-cuda computes" in find_reason("torch-cuda", "linear", "int8", "float16", "", quantized=False)
