"""Adapters in peft's format: kept unmerged, read by peft and read from peft, merged on request."""

import json

import models
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from laconic.errors import SourceError, UsageError
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.runtimes.adapter_config import CONFIG, WEIGHTS
from laconic.runtimes.adapter_graph import LinearProduct
from laconic.runtimes.low_rank_adapter import read_low_rank_adapter
from laconic.tasks.text import WORDS
from train.finetune.finetune import finetune
from train.settings import TrainingRecipe

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # by peft
    pytest.mark.filterwarnings("ignore:.*(fan_in_fan_out|tied|tie_|save_embedding|embedding):UserWarning"),  # by peft
    pytest.mark.filterwarnings("ignore:.*have invalid shape:UserWarning"),  # by peft, of the biases of lora_bias
]
TEXTS = ["hello world", "the model answers", "a"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    models.save_gpt2(folder / "gpt2")
    models.save_llama(folder / "llama")
    models.save_bert(folder / "bert", hidden_dropout_prob=0.0)
    (folder / "texts.txt").write_text("\n".join(f"hello {word} a b" for word in WORDS))
    rows = [{"text": f"{word} a", "label": ["no", "maybe", "yes"][number % 3]} for number, word in enumerate(WORDS)]
    (folder / "classes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def tune(home, output, source="gpt2", merge=False, technique="lora", **changes):
    given = {
        "source": str(home / source), "data": str(home / ("classes.jsonl" if source == "bert" else "texts.txt")),
        "batch_size": 4, "steps": 4, "precision": "fp32", "optimizer": {"adamw": {"lr": 0.02}},
        "loader": {"workers": 0}, "techniques": [{technique: {"rank": 4, "merge": merge}}],
    }  # fmt: skip
    return finetune(TrainingRecipe.model_validate(given | changes), output, steps=Steps(quiet=True))


def answers(checkpoint):
    inputs = {name: torch.from_numpy(array) for name, array in checkpoint.task.encode(TEXTS).items()}
    with torch.no_grad():
        answer = checkpoint.module(**inputs)
    return answer["log_likelihoods"] if isinstance(answer, dict) else answer


def assert_factors_are_what_is_merged(adapter, base, merged):
    """What a server computes beside the base's products."""
    known = dict(transformers.AutoModelForCausalLM.from_pretrained(base).named_modules())
    linear = {name: module for name, module in known.items() if isinstance(module, torch.nn.Linear)}
    products = [LinearProduct(f"model.{name}", each.in_features, each.out_features) for name, each in linear.items()]
    factors = read_low_rank_adapter(adapter, products).factors
    weights = Checkpoint.load(merged).module.model.state_dict()
    assert len(factors) == 7 * known[""].config.num_hidden_layers
    for name, (down, up) in factors.items():
        own = name.removeprefix("model.")
        change = (weights[f"{own}.weight"] - linear[own].weight).T
        torch.testing.assert_close(torch.from_numpy(down @ up), change, atol=1e-5, rtol=1e-4)


@pytest.mark.sweep("bert", "gpt2")
@pytest.mark.parametrize("source", ["gpt2", "llama", "bert"])
def test_adapters_that_were_kept_are_the_merged_model_here_and_in_peft(home, tmp_path, source):
    tune(home, tmp_path / "whole", source, merge=True)
    tune(home, tmp_path / "kept", source)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {CONFIG, WEIGHTS, "training"}
    wanted, found = answers(Checkpoint.load(tmp_path / "whole")), load_source(tmp_path / "kept")
    torch.testing.assert_close(answers(found), wanted, atol=1e-5, rtol=1e-5)
    assert found.history[-1].stage == "finetune"
    kind = transformers.BertForSequenceClassification if source == "bert" else transformers.AutoModelForCausalLM
    theirs = peft.PeftModel.from_pretrained(kind.from_pretrained(home / source).eval(), tmp_path / "kept").eval()
    if source == "llama":
        assert_factors_are_what_is_merged(tmp_path / "kept", home / source, tmp_path / "whole")
    before = answers(load_source(home / source))
    own = load_source(home / source)
    own.module.model = theirs.merge_and_unload()
    torch.testing.assert_close(answers(own), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, wanted, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}, {"use_dora": True, "use_rslora": True}],
    ids=str,
)
def test_adapters_of_peft_are_merged_as_peft_merges_them(home, tmp_path, settings):
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 3, "target_modules": ["v_proj"], "init_lora_weights": False} | settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "llama").eval()
    theirs = peft.get_peft_model(model, config)
    theirs.save_pretrained(tmp_path / "theirs")
    found = load_source(tmp_path / "theirs")
    own = load_source(home / "llama")
    own.module.model = theirs.merge_and_unload()
    torch.testing.assert_close(answers(found), answers(own), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(answers(found), answers(load_source(home / "llama")), atol=1e-3), "it was merged"


def test_an_adapter_is_trained_further_and_merged_on_request(laconic, home, tmp_path):
    tune(home, tmp_path / "first")
    again = tune(home, tmp_path / "second", source=tmp_path / "first", technique="qlora")
    assert again.after["loss"] < again.before["loss"]
    code, out, err = laconic("merge", tmp_path / "second", "-o", tmp_path / "merged")
    assert code == 0, err
    assert "text-generation" in out
    merged = Checkpoint.load(tmp_path / "merged")
    torch.testing.assert_close(answers(merged), answers(load_source(tmp_path / "second")))
    assert len(merged.history) == 2
    code, _, err = laconic("merge", home / "gpt2", "-o", tmp_path / "other")
    assert code == 2
    assert "has no adapter_config.json" in err
    tune(home, tmp_path / "merged")  # in the place of a checkpoint, and the other way round
    tune(home, tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged" / CONFIG).exists()


BROKEN = {
    "another kind": ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    "names code": (
        {"megatron_config": {"a": 1}, "megatron_core": "os"},
        "megatron_config, which is not supported",
    ),
    "no alpha": ({"lora_alpha": None}, "is not the config of a LoRA adapter"),
    "factors of no form": ({"alpha_pattern": [1]}, "expected a number by the name of a layer"),
    "an expression that does not read": ({"alpha_pattern": {"(": 1}}, r"has '\(': 1 in alpha_pattern"),
    "an expression that takes ages": ({"alpha_pattern": {"(.|..)*x": 1}}, "at most 3 repeats, none of a group"),
    "lost its model": ({"base_model_name_or_path": "gone"}, "there is no such folder"),
    "of itself": ({"base_model_name_or_path": "."}, "there is no such folder"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_adapter_that_does_not_fit_is_answered_in_one_sentence(home, tmp_path, monkeypatch, case):
    tune(home, tmp_path / "kept", steps=1)
    changes, said = BROKEN[case]
    config = json.loads((tmp_path / "kept" / CONFIG).read_text())
    (tmp_path / "kept" / CONFIG).write_text(json.dumps(config | changes))
    monkeypatch.chdir(tmp_path / "kept")
    with pytest.raises(SourceError, match=said):
        load_source(tmp_path / "kept")


def test_weights_of_another_model_and_for_a_head_that_it_has_not_are_refused(home, tmp_path):
    tune(home, tmp_path / "kept", steps=1)
    config = json.loads((tmp_path / "kept" / CONFIG).read_text())
    (tmp_path / "kept" / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": str(home / "llama")}))
    with pytest.raises(SourceError, match="which the model has not"):
        load_source(tmp_path / "kept")
    weights = load_file(tmp_path / "kept" / WEIGHTS)
    weights.pop(next(name for name in weights if "lora_B" in name))
    save_file(weights, tmp_path / "kept" / WEIGHTS)
    (tmp_path / "kept" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(SourceError, match="is incomplete"):
        load_source(tmp_path / "kept")
    rows = [{"text": f"{word} a", "label": "up" if number % 2 else "down"} for number, word in enumerate(WORDS)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UsageError, match="has no head for these labels"):
        tune(home, tmp_path / "headless", "bert", data=str(tmp_path / "d.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl", "kept"]


def read_both(home, folder, changes, kind=transformers.AutoModelForCausalLM, base="gpt2", **options):
    """Save an adapter with random factors; return Laconic's checkpoint, and peft's own reload of the same folder."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM"} | changes
    theirs = peft.get_peft_model(kind.from_pretrained(home / base, **options), peft.LoraConfig(**settings))
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(kind.from_pretrained(home / base, **options).eval(), folder).eval()
    return load_source(folder), again


def difference(checkpoint, theirs):
    ids = torch.tensor([[4, 5, 6, 7, 8, 9, 10, 4]])
    with torch.no_grad():
        ours, expected = checkpoint.module(ids, torch.ones_like(ids)), theirs(input_ids=ids).logits
    if isinstance(ours, dict):
        ours, expected = ours["probabilities"], expected.softmax(dim=-1)
    return float((ours - expected).abs().max())


ALIKE = {
    "alpha by layer": {"rank_pattern": {"h.0.attn.c_attn": 2}, "alpha_pattern": {"h.0.attn.c_attn": 20}},
    "alpha by expression": {"alpha_pattern": {r"h\.1\..*": 20}, "use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "dora": {"use_dora": True},
    "dora by layer": {"use_dora": True, "use_rslora": True, "rank_pattern": {"h.0.attn.c_attn": 2}},
    "dora of a tied head": {"use_dora": True, "target_modules": ["lm_head"]},
    "biases": {"lora_bias": True, "alpha_pattern": {"h.0.attn.c_attn": 20}},
    "a tied head": {"target_modules": ["lm_head", "c_attn"]},
    "a whole norm": {"modules_to_save": ["ln_f"]},
    "a whole tied head": {"modules_to_save": ["lm_head"]},
    "a whole tied embedding": {"modules_to_save": ["wte"]},
    "rows of tokens": {"trainable_token_indices": [4, 7]},
    "rows by layer": {"trainable_token_indices": {"wte": [4, 7]}},
    "one layer": {"layers_to_transform": [1], "layers_pattern": "h"},
    "all but one": {"exclude_modules": ["h.0.attn.c_attn"]},
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_peft_writes_opens_as_peft_reads_it(home, tmp_path, case):
    found, theirs = read_both(home, tmp_path / "adapter", ALIKE[case])
    assert difference(found, theirs) < 1e-5
    assert difference(load_source(home / "gpt2"), theirs) > 1e-4, "it was merged"
    found.save(tmp_path / "saved")
    assert difference(Checkpoint.load(tmp_path / "saved"), theirs) < 1e-5


REFUSALS = {
    "init_lora_weights 'pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights 'pissa_niter_2'": {"init_lora_weights": "pissa_niter_2"},
    "init_lora_weights 'olora'": {"init_lora_weights": "olora"},
    "bias 'all'": {"bias": "all"},
    "alora_invocation_tokens, which cannot be merged": {"alora_invocation_tokens": [5, 6]},
    "target_parameters": {"target_modules": [], "target_parameters": ["h.0.mlp.c_fc.weight"]},
    "ensure_weight_tying": {"modules_to_save": ["wte"], "ensure_weight_tying": True},
    "lora_embedding_A, which is no part": {"target_modules": ["wte"]},
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # by peft
@pytest.mark.parametrize("said", REFUSALS)
def test_what_changes_more_than_weights_is_refused_by_name(home, tmp_path, said):
    with pytest.raises(SourceError, match=rf"{said}.*\. (Merge it with peft|Train a plain LoRA)"):
        read_both(home, tmp_path / "adapter", REFUSALS[said])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_newlora": True, "unset": None}, "with use_newlora, which is not supported"),
        ({"use_qalora": True}, "use_qalora, which cannot be merged"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config, which cannot be merged"),
        ({"kasa_config": {"beta": 1}}, "kasa_config, which is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication, which is not supported"),
        ({"init_lora_weights": "corda"}, "init_lora_weights 'corda', which is not supported"),
    ],
)
def test_a_setting_that_is_not_followed_is_refused_by_name(home, tmp_path, changes, said):
    tune(home, tmp_path / "kept", steps=1)
    config = json.loads((tmp_path / "kept" / CONFIG).read_text())
    (tmp_path / "kept" / CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(SourceError, match=said):
        load_source(tmp_path / "kept")


@pytest.mark.parametrize(
    ("config", "shape", "said"),
    [
        ({"use_dora": True}, (4, -1), "is incomplete"),
        ({}, (4, -1, 1, 1), r"one of a convolution.*\. Merge it with peft"),
    ],
)
def test_an_adapter_without_magnitudes_or_of_a_convolution_is_refused(home, tmp_path, config, shape, said):
    tune(home, tmp_path / "kept", steps=1)
    weights = load_file(tmp_path / "kept" / WEIGHTS)
    downs = {name: value.reshape(shape) for name, value in weights.items() if name.endswith("lora_A.weight")}
    save_file(weights | downs, tmp_path / "kept" / WEIGHTS)
    path = tmp_path / "kept" / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(SourceError, match=said):
        load_source(tmp_path / "kept")


def test_an_adapter_brings_a_head_for_classes(tmp_path):
    models.save_gpt2(tmp_path / "body")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "body", pad_token_id=0)
    transformers.GPT2Model(config).save_pretrained(tmp_path / "body")
    kind = transformers.AutoModelForSequenceClassification
    found, theirs = read_both(tmp_path, tmp_path / "adapter", {"task_type": "SEQ_CLS"}, kind, "body", num_labels=3)
    assert found.task.name == "text-classification"
    assert found.task.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert difference(found, theirs) < 1e-5
    found.save(tmp_path / "saved")
    assert difference(Checkpoint.load(tmp_path / "saved"), theirs) < 1e-5


def test_an_adapter_brings_a_head_beside_the_pooler_of_its_model(tmp_path):
    models.save_transformer(tmp_path / "body", transformers.BertModel(transformers.BertConfig(**models.TEXT)))
    kind, changes = (
        transformers.AutoModelForSequenceClassification,
        {"task_type": "SEQ_CLS", "target_modules": ["query"]},
    )
    found, theirs = read_both(tmp_path, tmp_path / "adapter", changes, kind, "body", num_labels=3)
    assert difference(found, theirs) < 1e-5


def test_a_head_of_which_a_part_is_nowhere_is_refused(tmp_path):
    models.save_transformer(tmp_path / "body", transformers.RobertaModel(transformers.RobertaConfig(**models.TEXT)))
    kind = transformers.AutoModelForSequenceClassification
    changes = {"task_type": "SEQ_CLS", "target_modules": ["query"], "modules_to_save": ["classifier"]}
    found, theirs = read_both(tmp_path, tmp_path / "adapter", changes, kind, "body", num_labels=3)
    assert difference(found, theirs) < 1e-5
    weights = load_file(tmp_path / "adapter" / WEIGHTS)
    weights.pop("base_model.model.classifier.dense.bias")
    save_file(weights, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(SourceError, match=r"has the weight classifier\.dense\.bias of the head"):
        load_source(tmp_path / "adapter")


def test_an_adapter_brings_its_tokenizer(home, tmp_path):
    read_both(home, tmp_path / "adapter", {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "gpt2")
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    task, before = load_source(tmp_path / "adapter").task, load_source(home / "gpt2").task
    assert tokenizer.convert_tokens_to_ids("<tool>") in task.encode([f"{WORDS[0]} <tool>"])["input_ids"]
    assert (task.encode(TEXTS)["input_ids"] == before.encode(TEXTS)["input_ids"]).all()
