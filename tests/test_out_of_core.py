"""Language models that are quantized a layer at a time: the same weights as with the whole model in memory, proven,
resumed at its layer, read by transformers."""

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import chat_models
import numpy as np
import pytest
import torch
import transformers
from language_models import save
from safetensors.torch import load_file

from compress.checkpoint_report import compare_with_original
from compress.out_of_core.layer_loop import LayerLoop, observe_linear_inputs
from compress.out_of_core.layer_rounding import InputMoments, find_linear
from compress.out_of_core.layer_scaling import find_sources
from compress.out_of_core.quantized_checkpoint import make_context, quantize_checkpoint, with_own_targets
from compress.out_of_core.stage_settings import read_settings
from compress.quantize.awq import find_awq_scales
from compress.quantize.calibration import draw_calibration_samples
from compress.quantize.plan_rounding import round_plan
from compress.quantize.weight_only import find_precisions
from export.sources import capture_graph
from laconic.cache import Cache
from laconic.cli import DISK_FULL
from laconic.data.dataset import Samples
from laconic.errors import RecipeError, SourceError, UsageError
from laconic.models.checkpoint import check_free
from laconic.models.language_model import LanguageModel
from laconic.models.sharded_model import open_sharded_model
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import load_source
from laconic.models.torch_session import TorchSession
from laconic.progress import Steps
from laconic.quantization.plan import Plan
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import split_samples
from laconic.runtimes.predict import predict
from laconic.weight_formats.packed_integers import unpack

QUIET = Steps(quiet=True)
SETTINGS = {"group_size": 32, "mixed_precision": False, "samples": 6}
GPTQ, AWQ = {"quantize.gptq": SETTINGS}, {"quantize.awq": SETTINGS}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small Llama in BF16 and in several shards, with the tokenizer of the chat model, and texts."""
    folder = tmp_path_factory.mktemp("sharded")
    save_llama(folder / "model")
    rows = [{"text": f"row {number}: " + "one two three four five six seven " * 4} for number in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def save_llama(folder):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(chat_models.make_config())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.bfloat16().save_pretrained(folder, max_shard_size="60KB")
    chat_models.make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_recipe(folder, stage=GPTQ, **keys):
    data = str(folder / "texts.jsonl")
    stated = {"source": str(folder / "model"), "data": data, "task": "text-generation", "to": "checkpoint"}
    return Recipe.parse(stated | {"stages": [stage]} | keys)


def quantize(source, folder, texts=None, stage=GPTQ):
    """The checkpoint in `folder`, by a cache there. texts: the folder of the samples, by default the source's."""
    data = str((texts or source) / "texts.jsonl")
    recipe = make_recipe(source, stage, data=data)
    return quantize_checkpoint(recipe, folder / "out", steps=QUIET, cache=Cache(folder / "cache"))


def read_bytes(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def written(source):
    return quantize(source, source)


@pytest.fixture(scope="module")
def scaled(source, tmp_path_factory):
    return quantize(source, tmp_path_factory.mktemp("scaled"), source, AWQ)


@pytest.mark.parametrize("stage", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_weights_are_those_that_are_rounded_with_the_whole_model_in_memory(shared, source, tmp_path, stage):
    chat_models.open_chat_model(shared)  # its graph is captured already, in the cache of the other tests
    recipe = make_recipe(source, stage, source=str(shared / "chat" / "source"))
    cache, settings = Cache(tmp_path / "cache"), read_settings(recipe)
    written = quantize_checkpoint(recipe, tmp_path / "out", steps=QUIET, cache=cache)
    origin = CheckpointSource.of(load_source(Path(recipe.source), task="text-generation"))
    graph, task = capture_graph(origin, Cache(shared / "cache")), origin.checkpoint.task
    model = open_sharded_model(Path(recipe.source))
    context = make_context(recipe, model, split_samples(recipe, model.task), tmp_path, cache, QUIET)
    samples = Samples(context.calibrate.samples, task.parse)
    context = replace(context, task=task, calibrate=replace(context.calibrate, samples=samples))
    datasets = draw_calibration_samples(context, settings.samples)
    plan = Plan(find_precisions(graph, 4, ()))
    if stage is AWQ:
        plan = replace(plan, smoothing=find_awq_scales(graph, plan, settings.config, datasets, context))
    plan = round_plan(graph, plan, settings.config, datasets, context)
    stored = {name: tensor for path in written.path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    differing = count = 0
    for (node, _), weight in plan.weights.items():
        path = node.removeprefix("model.").removesuffix("/MatMul")
        if f"{path}.weight_packed" in stored:
            if stage is AWQ and path.endswith("o_proj"):
                continue  # heads that share values share their factors in a checkpoint
            scales = stored[f"{path}.weight_scale"].numpy().T
            if stage is AWQ and path.endswith("up_proj"):  # what the product is divided by is in the scales before it
                scales = scales * plan.smoothing[f"{node.removesuffix('.up_proj/MatMul')}/Mul"].factors
            if not path.endswith("v_proj"):  # likewise, with factors of its own
                # A factor's last digit may round a scale to FP16 the other way.
                assert np.isclose(scales, weight.scales, rtol=1e-5).mean() > (0.99 if stage is AWQ else 0.9999), path
            integers = unpack(stored[f"{path}.weight_packed"], 4).numpy().T - 8
            differing, count = differing + int((integers != weight.integers).sum()), count + weight.integers.size
    assert count == 2 * (64 * 64 * (2 if stage is GPTQ else 1) + 64 * 32 * 2 + 64 * 128 * 3)
    assert len([tensor for tensor in plan.smoothing if ".layers." in tensor]) == (8 if stage is AWQ else 0)
    assert differing <= 20  # the engine adds in another order, by which a sum may be rounded the other way


@pytest.mark.parametrize("stage", ["written", "scaled"])
def test_figures_are_those_of_both_models_as_transformers_reads_them(source, request, stage):
    written = request.getfixturevalue(stage)
    model, recipe = open_sharded_model(source / "model"), make_recipe(source)
    judge = with_own_targets(split_samples(recipe, model.task).judge, model.task)
    results = load_source(source / "model", task="text-generation").outputs
    answers = []
    for folder in (source / "model", written.path):
        module = LanguageModel(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        module.model(torch.zeros((1, 1), dtype=torch.int64))  # by which transformers restores the weights
        with TorchSession(module, model.task.inputs, results) as session:
            answers.append(predict(session, model.task, judge))
    figures = compare_with_original(model.task, *answers, judge, recipe).figures
    assert figures == pytest.approx(written.report["drift"]["figures"], rel=1e-4)
    assert json.loads((written.path / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    assert ("quantize.gptq" if stage == "written" else "quantize.awq") in (written.path / "report.html").read_text()


def test_a_quantized_folder_is_replaced_and_no_other_of_transformers(source, written):
    check_free(written.path)
    with pytest.raises(UsageError, match="is not a checkpoint: it will not be overwritten"):
        check_free(source / "model")


class Killed(BaseException):
    """In the place of a signal: nothing handles it."""


@pytest.mark.sweep("*-1", "*-3", "*-4")
@pytest.mark.parametrize(
    ("stage", "count"), [*(("written", count) for count in range(5)), ("scaled", 2), ("scaled", 3)]
)
def test_a_killed_run_resumes_at_its_layer_with_equal_bytes(source, request, tmp_path, monkeypatch, stage, count):
    """Killed before a file appears: what layers read, or the weights of a layer."""
    replace_file, done = Path.replace, []
    whole, stages = request.getfixturevalue(stage), {"written": GPTQ, "scaled": AWQ}

    def die(path, target):
        if "layers-" in str(path):
            done.append(path.name)
        if len(done) > count:
            raise Killed
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(Killed):
        quantize(source, tmp_path, stage=stages[stage])
    monkeypatch.undo()
    assert done[-1].startswith("layer" if count % 2 else "states")
    assert not (tmp_path / "out").exists()
    assert read_bytes(quantize(source, tmp_path, stage=stages[stage]).path) == read_bytes(whole.path)
    assert not list((tmp_path / "cache").glob("layers-*"))


def test_a_full_disk_loses_nothing(source, written, tmp_path):
    """The limit of the size of files stands for a disk that fills; the command says it in a sentence."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            quantize(source, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno in DISK_FULL
    assert read_bytes(quantize(source, tmp_path).path) == read_bytes(written.path)


def test_folders_that_cannot_be_read_layer_by_layer_are_refused(source, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(source / "model", folder)
    shard = folder / sorted(path.name for path in folder.glob("model-*"))[2]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(SourceError, match="cut short"):
        quantize(tmp_path, tmp_path, source)
    shard.unlink()
    with pytest.raises(SourceError, match=rf"lacks {shard.name}, which .* names. Copy the folder again"):
        quantize(tmp_path, tmp_path, source)
    with pytest.raises(SourceError, match="whose weights have the names that transformers gives them"):
        open_sharded_model(save(tmp_path / "mixtral", "mixtral"))
    recipe = make_recipe(source, source=str(save(tmp_path / "gpt2", "gpt2")))
    with pytest.raises(RecipeError, match=r"no nn.Linear.* Leave `to: checkpoint` out"):
        quantize_checkpoint(recipe, tmp_path / "out", steps=QUIET, cache=Cache(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"symmetric": False}, "symmetric must be true"),
        ({"mixed_precision": True}, "mixed_precision must be false"),
        ({"keep": ["*"]}, "`keep` leaves no linear module"),
        ({"keep": ["nothing"]}, "no layer is named 'nothing'"),
    ],
)
def test_settings_that_a_checkpoint_cannot_have_are_refused(source, tmp_path, settings, message):
    stage = {"quantize.gptq": {"group_size": 32, "mixed_precision": False} | settings}
    with pytest.raises(RecipeError, match=message):
        quantize_checkpoint(make_recipe(source, stage), tmp_path / "out", steps=QUIET, cache=Cache(tmp_path / "cache"))


def test_layers_are_divided_by_factors_where_they_compute_the_same_then(tmp_path):
    """Gemma's norms add 1 to their weights; BLOOM has a GELU, and queries, keys and values as one module."""
    found = {}
    for family in ("gemma3", "opt", "bloom"):
        model = open_sharded_model(save(tmp_path / family, family))
        loop, moments = LayerLoop(model), InputMoments()
        with model.loaded(loop.embeddings):
            states = loop.embed(torch.arange(5, 25)[None])
        with model.loaded(loop.layers[0]):
            with observe_linear_inputs(loop.layers[0], moments.add):
                made = loop.run(0, states)
            groups = moments.group_paths()
            sources = find_sources(loop, 0, states, groups, find_linear(loop.layers[0]))
            assert torch.equal(loop.run(0, states), made), "nothing has changed"
        found[family] = [sources[paths[0]].path if paths[0] in sources else None for paths in groups]
    assert found == {
        "gemma3": ["input_layernorm", "self_attn.v_proj", "pre_feedforward_layernorm", "mlp.up_proj"],
        "opt": ["self_attn_layer_norm", "self_attn.v_proj", "final_layer_norm", "fc1"],
        "bloom": ["input_layernorm", None, "post_attention_layernorm", None],
    }


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "gemma3", "opt", "gpt2", "bloom", "openai-gpt"])
def test_one_part_at_a_time_computes_what_the_whole_model_does(tmp_path, family):
    folder = save(tmp_path / family, family)
    model = open_sharded_model(folder)
    loop, ids = LayerLoop(model), torch.arange(5, 25)[None]
    with model.loaded(loop.embeddings):
        states = loop.embed(ids)
    for number, layer in enumerate(loop.layers):
        with model.loaded(layer):
            states = loop.run(number, states)
        assert all(parameter.is_meta for parameter in layer.parameters())
    with model.loaded(loop.head), torch.no_grad():
        logits = model.module.compute_logits(loop.finish(states))
    whole = load_source(folder, task="text-generation").module
    with torch.no_grad():
        assert torch.allclose(logits, whole.compute_logits(whole.hidden(ids)), atol=1e-4)
