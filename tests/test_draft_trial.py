"""A draft model of an artifact: tried, taken where it is faster, served, and refused where it does not fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts import write_keys
from chat_models import COUNT, make_tokenizer, open_chat_model, render, save_chat_model
from served import running
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from export.pipeline import export
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.artifact_signature import sign_artifact
from laconic.artifacts.draft import DRAFT
from laconic.cache import Cache
from laconic.errors import CorruptArtifact, UsageError
from laconic.hashing import digest_file
from laconic.progress import Step
from laconic.recipes.recipe import Recipe

pytest.importorskip("openvino_genai")
from export.draft_trial import DraftPair, add_draft
from export.report.added_sections import add_draft_trial


def write_null_model(shared: Path, folder: Path) -> Path:
    """The artifact of a model with the tokenizer of the chat model, that writes the same token whatever it reads."""
    source = save_chat_model(folder / "source")
    model = LlamaForCausalLM.from_pretrained(source)
    model.model.embed_tokens.weight.data[:] = torch.randn(64)  # whatever it reads is the same
    model.save_pretrained(source)
    return write_artifact(shared, source, folder / "null.laconic")


def write_artifact(shared: Path, source: Path, path: Path) -> Path:
    recipe = {"source": str(source), "task": "text-generation", "stages": [], "engine_only": "openvino"}
    export(Recipe.parse(recipe), path, cache=Cache(shared / "cache"))
    return path


def test_a_draft_of_one_constant_token_is_left_out(shared: Path, tmp_path: Path, laconic: Any) -> None:
    chat = open_chat_model(shared)[1]
    null = write_null_model(shared, tmp_path)
    output = tmp_path / "drafted.laconic"
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in (render(COUNT), "one", "two three")))
    code, out, error = laconic("build", chat, "--draft", null, "--data", data, "-o", output)
    assert (code, DRAFT in Artifact.load(output).manifest.files) == (3, False)
    assert "it was left out" in out
    assert "is no faster" in error
    built = Artifact.load(output)
    assert built.manifest.files == Artifact.load(chat).manifest.files
    assert built.measured.draft is not None
    assert built.measured.draft.same == built.measured.draft.prompts == 3
    assert "Draft model" in (output / "report.html").read_text()
    code, _, error = laconic("build", chat, "--draft", null, "--target", "cuda", "-o", output)
    assert code == 2
    assert "--target is for another target or engine" in error


def test_an_artifact_with_a_draft_is_opened_signed_packaged_and_served(
    shared: Path, tmp_path: Path, laconic: Any
) -> None:
    """Drafted by itself, the model chooses what it drafts; the figures that decide are set, since they are times."""
    chat = open_chat_model(shared)[1]
    pair = DraftPair(Artifact.load(chat), Artifact.load(chat))
    trial = pair.try_out(pair.choose_prompts(None), Step(None, "", None))
    assert trial.same == trial.prompts
    assert trial.paged_ratio is not None
    trial = trial.model_copy(update={"ratio": (1.2, 1.3, 1.4), "paged_ratio": (1.2, 1.3, 1.4)})
    folder = tmp_path / "chat.laconic"
    output = add_draft(chat, chat, folder)[0].path
    pair.write_draft(output, trial)
    add_draft_trial(output, trial)
    assert (output / "report.html").read_text().count("<h2>Draft model</h2>") == 1
    draft = Artifact.load(output).manifest.draft
    assert draft is not None
    assert draft.beats_paged
    assert laconic("verify", output)[0] == 0
    pytest.importorskip("cryptography", reason="the extra sign")
    private, public = write_keys(tmp_path)
    sign_artifact(output, private)
    context = tmp_path / "context"
    assert laconic("package", output, "--require-signature", public, "-o", context)[0] == 0
    assert digest_file(next(context.rglob(DRAFT))) == Artifact.load(output).manifest.files[DRAFT]
    prompt = make_tokenizer().encode(render(COUNT)).ids
    request = {"model": "chat", "prompt": prompt, "max_tokens": 30, "temperature": 0}
    with running(chat, threads=1, kv_cache=8 << 20) as server, server.client() as client:
        plain = client.post("/v1/completions", json=request, timeout=60).json()
    with running(output, threads=1, kv_cache=8 << 20) as server, server.client() as client:
        for _ in range(400):  # paged attention writes until the draft is open
            drafted = client.post("/v1/completions", json=request, timeout=60).json()
            proposed, accepted = read_drafts(client.get("/metrics").text)
            assert drafted["choices"] == plain["choices"]
            if accepted:
                break
    assert proposed >= accepted > 10
    (output / DRAFT).write_bytes((output / DRAFT).read_bytes()[:-1])
    with pytest.raises(CorruptArtifact, match=DRAFT):
        Artifact.load(output)


def read_drafts(metrics: str) -> list[int]:
    """The tokens that were proposed, and accepted."""
    return [int(count) for count in re.findall(r"laconic_generation_draft_tokens_total\{.*\} (\d+)", metrics)]


def test_a_draft_with_another_tokenizer_is_refused(shared: Path, tmp_path: Path) -> None:
    chat = open_chat_model(shared)[1]
    source = save_chat_model(tmp_path / "source")
    settings = json.loads((source / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Tokenizer.from_str(json.dumps(settings)).save(str(source / "tokenizer.json"))
    other = write_artifact(shared, source, tmp_path / "other.laconic")
    with pytest.raises(UsageError, match="has another tokenizer than"):
        add_draft(chat, other, tmp_path / "drafted.laconic")
    assert digest_file(chat / "model.onnx") == Artifact.load(chat).manifest.files["model.onnx"]
