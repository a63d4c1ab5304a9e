"""The verdict of an adapter: an artifact that computes with it, against its original with the adapter merged."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from artifacts import write_artifact
from chat_models import open_chat_model
from lora_models import make_adapter
from safetensors.torch import load_file, save_file

pytest.importorskip("openvino_genai")
from export.adapter_verdict import NUMBER, AdapterAnswers, AdapterTrial
from laconic.artifacts.artifact import Artifact
from laconic.cache import VARIABLE
from laconic.models.adapter import read_adapter
from laconic.progress import Steps
from laconic.runtimes.adapter_config import CONFIG, WEIGHTS

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft
WORDS = ["one", "two", "three", "cat", "sat", "mat", "say", "count", "ten", "nine"]


def scale_adapter(folder, factor):
    weights = load_file(folder / WEIGHTS)
    save_file({name: each * factor if "lora_B" in name else each for name, each in weights.items()}, folder / WEIGHTS)


@pytest.fixture(scope="module")
def folder(shared, tmp_path_factory):
    """Adapters of the chat model, strong, weak and without effect, and texts."""
    source, folder = open_chat_model(shared)[1].parent / "source", tmp_path_factory.mktemp("adapters")
    for name, factor in (("strong", 1), ("weak", 0.003), ("none", 0)):
        make_adapter(source, folder / name, target_modules="all-linear", use_rslora=True)
        scale_adapter(folder / name, factor)
    rng = np.random.default_rng(0)
    rows = [json.dumps({"text": " ".join(rng.choice(WORDS, 12))}) for _ in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def artifact(shared):
    return open_chat_model(shared)[1]


@pytest.fixture
def verify(laconic, artifact, folder, tmp_path, monkeypatch):
    """The command on an adapter."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    data = folder / "texts.jsonl"
    return lambda adapter, *more: laconic("verify", artifact, "--adapter", adapter, "--data", data, *more)


def test_an_adapter_gets_the_figures_of_an_artifact_and_what_it_changes(verify, folder):
    code, out, err = verify(folder / "strong", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["state"] == "passed"
    assert report["missed"] == []
    (whole,) = report["drift"]
    assert whole["samples"] == 40
    assert whole["figures"]["fidelity"] > 0.999
    assert whole["required"] == {"fidelity": 0.98, "metric_change": -0.01}
    assert "perplexity_ratio" in whole["intervals"]
    figures = {name: value for each in report["information"] for name, value in each["figures"].items()}
    assert {"skill", "agreement", "prefix_kept", "exp_minus_kl"} <= figures.keys()
    assert figures["explained_change"] > 0.999
    assert figures["fidelity_without_adapter"] < 0.5
    assert "verdict passed" in " ".join(verify(folder / "strong")[1].split())


@pytest.mark.parametrize("name", ["strong", "weak"])
def test_an_adapter_that_is_lost_fails_even_where_it_changes_little(artifact, folder, name, tmp_path, monkeypatch):
    """Without the adapter, the artifact answers almost as the original with a weak one does."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    adapter = read_adapter(folder / name)
    trial = AdapterTrial(
        Artifact.load(artifact), folder / name, adapter, adapter.base, trust=False, steps=Steps(quiet=True)
    )
    with trial.open_generator() as generator:
        generator.load_adapter(NUMBER, folder / name)
        samples, reference = trial.run_original(trial.read_samples(folder / "texts.jsonl"))
        candidate = trial.run_artifact(generator, samples)
    assert trial.compare(reference, candidate, samples).passed
    lost = trial.compare(reference, AdapterAnswers(candidate.base, candidate.base), samples)
    assert lost.drift[0].passed is (name == "weak")
    assert any("explained_change is 0, required 0.8" in sentence for sentence in lost.failures)
    for null in trial.task.null_answers(reference.adapted).values():
        answers = AdapterAnswers(candidate.base, reference.adapted | null)
        assert trial.compare(reference, answers, samples).state == "failed"


def test_an_adapter_of_another_model_with_the_same_layers_fails(artifact, folder, verify, tmp_path):
    """Nothing but its answers tells it: its original is the model that it names."""
    other = tmp_path / "other"
    shutil.copytree(artifact.parent / "source", other)
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(other)
    transformers.LlamaForCausalLM(config).save_pretrained(other)
    make_adapter(other, tmp_path / "adapter")
    code, out, err = verify(tmp_path / "adapter")
    assert code == 3
    assert "artifact with the adapter against original with the adapter: fidelity is" in err
    assert "failed" in out


def test_what_cannot_be_judged_gets_one_sentence(artifact, folder, verify, laconic, tmp_path):
    shutil.copytree(folder / "strong", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "org/model"}))
    shutil.copytree(folder / "strong", tmp_path / "renamed")
    weights = load_file(tmp_path / "renamed" / WEIGHTS)
    save_file(
        {name.replace("layers.1", "layers.9"): each for name, each in weights.items()}, tmp_path / "renamed" / WEIGHTS
    )
    other, data = write_artifact(tmp_path / "other.laconic"), folder / "texts.jsonl"
    refused = [
        (
            verify(tmp_path / "adapter"),
            "is an adapter of 'org/model', which is not there. Give that model as --original",
        ),
        (verify(tmp_path / "renamed"), "a layer model.model.layers.9"),
        (verify(folder / "none"), "changes no answer"),
        (verify(folder), "adapter_config.json is missing"),
        (verify(folder / "strong", "--runtime", "onnxruntime"), "--runtime is not for the verdict"),
        (verify(folder / "strong", "--ledger"), "--ledger is not for the verdict"),
        (laconic("verify", artifact, "--adapter", folder / "strong"), "Give --data"),
        (laconic("verify", other, "--adapter", folder / "strong", "--data", data), "is no language model"),
    ]
    for (code, _, err), message in refused:
        assert code == 2, err
        assert [message in line for line in err.splitlines() if not line.startswith("done ")] == [True], err
    assert verify(tmp_path / "adapter", "--original", artifact.parent / "source")[0] == 0
