"""Adapters in peft's format: kept unmerged, read by peft and read from peft, merged on request."""

import json

import models
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from laconic.errors import SourceError, UsageError
from laconic.models.adapter import CONFIG, WEIGHTS
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.tasks.text import WORDS
from train.finetune.finetune import finetune
from train.settings import TrainingRecipe

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # by peft
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
        return checkpoint.module(**inputs)


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
    before = answers(load_source(home / source))
    own = load_source(home / source)
    own.module.model = theirs.merge_and_unload()
    torch.testing.assert_close(answers(own), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, wanted, atol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}], ids=str)
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
    assert "causal-lm" in out
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
    "names code": ({"megatron_config": {"a": 1}, "megatron_core": "os"}, "megatron_config, which is not supported"),
    "no alpha": ({"lora_alpha": None}, "is not the config of a LoRA adapter"),
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
