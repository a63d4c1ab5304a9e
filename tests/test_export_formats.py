"""Artifacts of language models in the formats of other programs, each read back by its own reader."""

import functools
import json
import shutil
from dataclasses import replace

import chat_models
import gguf
import numpy as np
import openvino_genai
import pytest
import torch
import transformers
from onnx import helper, numpy_helper
from safetensors.numpy import save_file

from compress.quantize.plan_rounding import RoundingConfig, round_layers
from compress.quantize.weight_only import find_precisions
from export.candidates.engine_option import EngineOption
from export.formats.gguf_file import write_gguf
from export.formats.quantized_model import GraphWeights, read_quantized_model, restore
from export.formats.write import write_format
from export.sources import capture_graph
from laconic import registry
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.golden import flatten_golden
from laconic.artifacts.manifest import GOLDEN, MANIFEST, MODEL, Manifest, read_measurements
from laconic.cache import Cache
from laconic.errors import FormatRefused, UsageError
from laconic.hashing import digest_file, seal
from laconic.models.gguf_splitting import SPLITTING, find_splitting, set_splitting
from laconic.models.language_model import LanguageModel
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.quantization.plan import Plan
from laconic.runtimes.runtime import make_runtime

QUIET = Steps(quiet=True)
TASK = "text-generation"
IDS = torch.arange(5, 25)[None]
PLANS = {
    "int8": (8, RoundingConfig(int8_group_size=32), ()),
    "int4": (4, RoundingConfig(group_size=32, int8_group_size=32), ()),
    "zeros": (4, RoundingConfig(group_size=32, int8_group_size=32, symmetric=False), ()),
    "mixed": (4, RoundingConfig(group_size=32), ("*down_proj*",)),
    "rows": (8, None, ()),
    "half": (16, None, ()),
    "table": (4, RoundingConfig(group_size=64, symmetric=False), ()),
    "dynamic": ("int8-dynamic", None, ()),
}
"""Bits, how weights are rounded, and layers in float; of "table", embeddings have 4 bits, too."""


@pytest.fixture(scope="module")
def make(shared, tmp_path_factory):
    """Makes the artifact of one of PLANS, once, from the graph of the small chat model; its tokenizer splits texts as
    SmolLM2's, and merges two letters."""
    _, original = chat_models.open_chat_model(shared)
    source, root = shared / "chat" / "source", tmp_path_factory.mktemp("formats")
    graph = capture_graph(CheckpointSource.of(load_source(source, task=TASK)), Cache(shared / "cache"))

    @functools.cache
    def make(name):
        bits, config, keep = PLANS[name]
        folder = root / f"{name}.laconic"
        shutil.copytree(original, folder)
        weight_bits = 8 if config is None and bits != 16 else bits
        plan = Plan(find_precisions(graph, weight_bits, keep, 4 if name == "table" else 8))
        engine = EngineOption("openvino", "float32")
        if bits == "int8-dynamic":
            kinds = {"Gather": "int8-weight", "MatMul": "int8-dynamic"}
            plan = Plan({layer.node: kinds[layer.kind] for layer in graph.layers})
            engine = EngineOption("onnxruntime", "float32")
        if config is not None:
            rounded = round_layers(graph, graph.layers, plan, [config], [], None)
            weights = {(layer.node, plan.precision[layer.node]): weight for layer, (weight,) in rounded}
            plan = replace(plan, weights=weights)
        engine.build(graph, plan, folder / MODEL)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        set_splitting(tokenizer, "smollm")
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["th"] = vocabulary.pop("\u0143")
        tokenizer["model"]["merges"] = [["t", "h"]]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        seal_folder(folder, plan, engine)
        return read_quantized_model(Artifact.load(folder))

    return make


def seal_folder(folder, plan, engine):
    """Give an artifact whose graph was replaced its golden outputs and its digests."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    manifest |= {"precision": plan.precision, "placement": engine.runtime}
    artifact = Artifact(folder, Manifest.model_validate(manifest), read_measurements(folder))
    (placement,) = artifact.manifest.placements
    (session,) = artifact.open_unchecked(make_runtime(engine.runtime), placement)
    pairs = [(inputs, session.run(inputs)) for inputs, _ in artifact.golden(placement)]
    save_file(flatten_golden(pairs), folder / GOLDEN)
    manifest["files"] = {name: digest_file(folder / name).model_dump() for name in manifest["files"]}
    (folder / MANIFEST).write_bytes(seal(manifest))


def test_parameters_with_equal_values_are_found_in_the_tensor_that_they_share():
    ones = numpy_helper.from_array(np.ones(4, np.float32), "model.first.weight")
    epsilon = numpy_helper.from_array(np.float32(1e-5), "epsilon")
    nodes = {
        f"model.{path}/{part}": helper.make_node("Mul", [name, "x"], ["y"], f"model.{path}/{part}")
        for path in ("first", "second")
        for part, name in (("Mul", "epsilon"), ("Mul_1", "model.first.weight"))
    }
    weights = GraphWeights(nodes, {"model.first.weight": ones, "epsilon": epsilon}, {})
    for path in ("first", "second"):
        np.testing.assert_array_equal(weights.find_float(path, f"{path}.weight", (4,)), np.ones(4))
    with pytest.raises(FormatRefused, match="has no weight"):
        weights.find_float("second", "second.weight", (5,))


@pytest.mark.parametrize("name", PLANS)
def test_the_weights_of_every_form_of_graph_give_the_golden_outputs(make, name):
    made = make(name)
    assert len(made.layers) == {"half": 0, "mixed": 14}.get(name, 16)
    widths = {layer.weight.integers.shape[0] for layer in made.layers.values()}
    assert widths <= {64, 128}
    assert {layer.has_integer_inputs for layer in made.layers.values()} <= {False, name == "dynamic"}


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def assert_same_weights(model, other):
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("name", registry.EXPORT_FORMATS)
def test_every_format_is_written_whole_and_overwrites_nothing(make, tmp_path, name):
    made = make("int8")
    written = write_format(made.artifact.path, name, tmp_path / "out", QUIET)
    assert written.size > 50_000
    with pytest.raises(UsageError, match="will not be overwritten"):
        write_format(made.artifact.path, name, tmp_path / "out", QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["int8", "int4", "mixed"])
def test_transformers_reads_compressed_tensors_and_answers_with_equal_logits(make, tmp_path, name):
    pytest.importorskip("compressed_tensors")
    made = make(name)
    write_format(made.artifact.path, "compressed-tensors", tmp_path / "out", QUIET)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(made.model), rtol=0, atol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == chat_models.render("hi")
    assert tokenizer("a 12").input_ids == made.task.tokenizer.encode("a 12").ids
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1


@pytest.mark.parametrize(
    ("form", "name"), [("compressed-tensors", "mixed"), ("gptq", "int8"), ("gptq", "int4"), ("gptq", "zeros")]
)
def test_what_is_written_opens_here_with_the_weights_of_the_artifact(make, tmp_path, form, name):
    made = make(name)
    write_format(made.artifact.path, form, tmp_path / "out", QUIET)
    assert_same_weights(made.model, load_source(tmp_path / "out", task="text-generation").module.model)


def test_weights_that_multiply_in_int8_are_written_whole_with_ranges_for_each_token(make, tmp_path):
    made = make("dynamic")
    write_format(made.artifact.path, "compressed-tensors", tmp_path / "out", QUIET)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "int-quantized"
    assert settings["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    weights = load_source(tmp_path / "out", task="text-generation").module.model.state_dict()
    name = "model.layers.0.self_attn.q_proj"
    np.testing.assert_array_equal(weights[f"{name}.weight"], restore(made.layers[name].weight).T)


@pytest.mark.parametrize(("name", "kind"), [("int8", "Q8_0"), ("int4", "Q4_0"), ("zeros", "Q4_1")])
def test_transformers_and_the_gguf_reader_read_what_is_written(make, tmp_path, name, kind):
    made = make(name)
    written = write_format(made.artifact.path, "gguf", tmp_path / "model.gguf", QUIET)
    assert ["zeros" in note for note in written.notes] == [True] * (name == "zeros")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert types["blk.1.ffn_down.weight"] == types["blk.0.attn_q.weight"] == kind
    assert types["blk.0.attn_norm.weight"] == "F32"
    checkpoint = load_source(tmp_path / "model.gguf", task="text-generation")
    tolerance = 0.05 if name == "zeros" else 0  # which are stored as the least number of a group, in FP16
    torch.testing.assert_close(logits(checkpoint.module.model), logits(made.model), rtol=0, atol=tolerance)
    for text in ("a 12", " naïve 你好"):
        assert checkpoint.task.tokenizer.encode(text).ids == made.task.tokenizer.encode(text).ids
    assert checkpoint.task.chat == made.task.chat or checkpoint.task.chat.text == made.task.chat.text


def test_openvino_genai_writes_from_the_ir_what_the_model_writes(make, tmp_path):
    made = make("int4")
    write_format(made.artifact.path, "openvino", tmp_path / "out", QUIET)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    pipeline = openvino_genai.LLMPipeline(tmp_path / "out", "CPU", **exact)
    prompt = chat_models.render("count")
    written = pipeline.generate(prompt, max_new_tokens=12, apply_chat_template=False, ignore_eos=True)
    ids = torch.tensor([made.task.tokenizer.encode(prompt).ids])
    expected = made.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, ids.shape[1] :]
    assert str(written) == made.task.tokenizer.decode(expected.tolist())


REFUSED = {
    "zeros in compressed-tensors": ("zeros", "compressed-tensors", "has zeros beside its scales"),
    "layers of several kinds in GPTQ": ("mixed", "gptq", "stored in another way than others"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_cannot_hold_is_named_and_nothing_is_written(make, tmp_path, case):
    name, form, said = REFUSED[case]
    made = make(name)
    with pytest.raises(FormatRefused, match=said):
        write_format(made.artifact.path, form, tmp_path / "out", QUIET)
    assert list(tmp_path.iterdir()) == []


def test_gguf_refuses_what_llama_cpp_would_compute_in_another_way(make, tmp_path):
    made = make("int8")
    config = made.model.config
    for key, value, said in (
        ("model_type", "gemma3", "'gemma3' are not written"),
        ("sliding_window", 8, "sliding window of 8 tokens"),
    ):
        old = getattr(config, key, None)
        setattr(config, key, value)
        with pytest.raises(FormatRefused, match=said):
            write_gguf(made, tmp_path / "model.gguf")
        setattr(config, key, old)
    per_row = {
        path: replace(layer, weight=replace(layer.weight, scales=layer.weight.scales * np.float32(1.0001)))
        for path, layer in made.layers.items()
    }
    with pytest.raises(FormatRefused, match="has scales that FP16 does not represent"):
        write_gguf(replace(made, layers=per_row), tmp_path / "model.gguf")


FAMILIES = {
    "mistral": (transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, {"head_dim": 128}),  # transformers reads no other from GGUF (5.23)
    "llama3": (
        transformers.LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families_come_back_from_gguf_with_their_weights(make, tmp_path, name):
    kind, changes = FAMILIES[name]
    shape = {key: value for key, value in chat_models.make_config().to_dict().items() if key != "model_type"}
    config = kind.config_class(**shape | changes)
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    write_gguf(replace(make("half"), module=LanguageModel(model), layers={}), tmp_path / "model.gguf")
    assert_same_weights(model, load_source(tmp_path / "model.gguf", task=TASK).module.model)


@pytest.mark.parametrize("name", SPLITTING)
def test_the_name_of_how_texts_are_split_leads_back_to_itself(name):
    tokenizer = {}
    set_splitting(tokenizer, name)
    assert find_splitting(tokenizer) == name


def test_weights_that_differ_from_the_golden_outputs_are_refused(make, tmp_path):
    path = tmp_path / "other.laconic"
    shutil.copytree(make("int8").artifact.path, path)
    artifact = Artifact.load(path)
    artifact.manifest.source["config"]["rms_norm_eps"] = 100.0
    with pytest.raises(FormatRefused, match="computes something else than transformers"):
        read_quantized_model(artifact)


def test_the_command_writes_a_format_and_refuses_options_without_use(make, tmp_path, laconic):
    arguments = ["export", make("int8").artifact.path, "--to", "gguf", "-o", tmp_path / "model.gguf"]
    code, shown, _ = laconic(*arguments, "--json")
    assert code == 0
    assert json.loads(shown)["format"] == "gguf"
    code, _, said = laconic(*arguments, "--task", "text-generation")
    assert code == 2
    assert "have no use" in said
