"""llama.cpp as an engine: texts that share its cache, drafts, scores, what is refused; and an artifact that is made for
it, judged in its arithmetic and served."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from chat_models import ANSWERS, COUNT, EMOJI, open_chat_model, render
from served import running
from test_generator import draw_prompts, finish
from tiny_decoders import VOCABULARY
from tiny_llama import TOKEN_BYTES, TinyLlama, write_llama

from export.pipeline import export
from export.rebuild import build
from laconic.artifacts.artifact import Artifact
from laconic.cache import Cache
from laconic.errors import FormatRefused, InputError, LaconicError, RuntimeFailure
from laconic.progress import Steps
from laconic.recipes.recipe import Origin, Recipe
from laconic.runtimes.generator import GenerationRequest, GoldenToken, Sampling, TokenEvent
from serve.model_repository import loader
from serve.model_repository.loader import choose_generator

pytest.importorskip("xllamacpp", reason="needs the extra llamacpp")
from laconic.runtimes import llamacpp_library
from laconic.runtimes.llamacpp import LlamaCpp, cut_batches
from laconic.runtimes.llamacpp_generator import LlamaCppGenerator
from laconic.runtimes.llamacpp_library import TEXTS

QUIET = Steps(quiet=True)
PRECISE = 1e-2
"""Keys and values are kept in FP16."""


@pytest.fixture(scope="module")
def llama() -> TinyLlama:
    return TinyLlama()


@pytest.fixture(scope="module")
def model(llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(llama.model, tmp_path_factory.mktemp("llama") / "model.onnx")


@pytest.fixture
def generator(model: Path) -> Iterator[LlamaCppGenerator]:
    with LlamaCppGenerator(model, context=512, cache_bytes=8192 * TOKEN_BYTES) as generator:
        yield generator


def measure_regret(llama: TinyLlama, prompt: Sequence[int], text: Sequence[int]) -> float:
    """By how much the logit of a token of a text is below the likeliest one's, at most."""
    logits = llama.predict([*prompt, *text])[len(prompt) - 1 : -1]
    return float((logits.max(-1).values - logits[range(len(text)), text]).max()) if text else 0.0


def test_more_texts_than_there_are_numbers_come_and_go(llama: TinyLlama, generator: LlamaCppGenerator) -> None:
    """Requests of any length are begun, cancelled and ended at random while others are written."""
    rng = np.random.default_rng(1)
    lengths = [1, 2, LlamaCppGenerator.piece + 240, *rng.integers(1, 60, 27).tolist()]
    prompts = draw_prompts(VOCABULARY, lengths)
    limits = rng.integers(1, 20, len(prompts)).tolist()
    choices = [1 + number % 4 for number in range(len(prompts))]
    assert sum(choices) > TEXTS
    texts: dict[tuple[int, int], list[int]] = {}
    cancelled = set()
    waiting = list(range(len(prompts)))
    while waiting or not generator.is_idle:
        for number in [waiting.pop(0) for _ in range(min(len(waiting), int(rng.integers(0, 20))))]:
            generator.add(GenerationRequest(number, prompts[number], Sampling(limits[number], n=choices[number])))
        if rng.random() < 0.2:
            generator.cancel(int(rng.integers(0, len(prompts))), int(rng.integers(0, 2)))
        for event in generator.step():
            texts.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
            if event.finish_reason == "cancelled":
                cancelled.add((event.request_id, event.choice))
    assert len(texts) == sum(choices)
    assert cancelled
    assert generator.ledger.used == 0
    for number, prompt in enumerate(prompts):
        for choice in range(choices[number]):
            text = texts[number, choice]
            assert len(text) == limits[number] or (number, choice) in cancelled
            assert measure_regret(llama, prompt, text) < 5 * PRECISE


def test_a_beginning_that_was_read_is_not_read_again(llama: TinyLlama, generator: LlamaCppGenerator) -> None:
    begin, first, second = draw_prompts(VOCABULARY, (100, 5, 5))
    cached = []
    for number, prompt in enumerate(((*begin, *first), (*begin, *second), (*begin, *first))):
        generator.add(GenerationRequest(number, prompt, Sampling(6)))
        events: list[TokenEvent] = []
        while not generator.is_idle:
            events += generator.step()
        assert measure_regret(llama, prompt, [token for event in events for token in event.token_ids]) < 5 * PRECISE
        cached += [event.cached_tokens for event in events if event.cached_tokens is not None]
    assert cached == [0, 100, 104]
    for number in range(generator.ledger.total // 16):  # the cache is needed for others
        generator.add(GenerationRequest(number, (number % VOCABULARY,) * 500, Sampling(12)))
    assert len(finish(generator)[0]) == generator.ledger.total // 16


def test_drafts_change_no_text(llama: TinyLlama, generator: LlamaCppGenerator) -> None:
    (prompt,) = draw_prompts(VOCABULARY, (4,))
    prompt = (*prompt, *llama.write_greedily(list(prompt), 30), *prompt)
    generator.add(GenerationRequest(1, prompt, Sampling(60)))
    accepted, drafted = 0, 0
    text: list[int] = []
    while not generator.is_idle:
        for event in generator.step():
            text += event.token_ids
            accepted, drafted = accepted + event.accepted, drafted + event.drafted
    assert len(text) == 60
    assert measure_regret(llama, prompt, text) < 5 * PRECISE
    assert drafted > accepted > 0


def test_scores_are_those_of_the_model(llama: TinyLlama, generator: LlamaCppGenerator) -> None:
    (prompt,) = draw_prompts(VOCABULARY, (2 * TEXTS + 7,))
    expected = llama.predict(list(prompt)).log_softmax(-1)
    generator.add(GenerationRequest(1, prompt, Sampling(1, logprobs=True, top_logprobs=3, prompt_logprobs=True)))
    generator.add(GenerationRequest(2, (5, 6), Sampling(40)))
    scores: list[Any] = []
    while not generator.is_idle:
        for event in generator.step():
            scores += event.prompt_scores
            if event.request_id == 1 and event.top_logprobs:
                likeliest = [token for token, _ in event.top_logprobs[0]]
    assert likeliest == expected[-1].topk(3).indices.tolist()
    wanted = [float(row[token]) for row, token in zip(expected, prompt[1:], strict=False)]
    assert [score for score, _ in scores] == pytest.approx(wanted, abs=5 * PRECISE)


def test_what_cannot_be_written_is_refused_in_a_sentence(
    model: Path, generator: LlamaCppGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sampling, message in (
        (Sampling(600), "longer than the model's context of 512 tokens"),
        (Sampling(1, n=TEXTS + 1), "choices are more than llama.cpp writes at once"),
        (Sampling(1, grammar="start: /a/"), "opened without its tokenizer"),
        (Sampling(1, timestamps=True), "writes language models alone"),
    ):
        with pytest.raises(InputError, match=message):
            generator.add(GenerationRequest(1, (1, 2), sampling))
    options: dict[str, Any] = {"context": 512, "cache_bytes": 1 << 20}
    wrong = [GoldenToken((1, token), 0) for token in range(8)]
    with pytest.raises(RuntimeFailure, match="golden tokens differ"):
        LlamaCppGenerator(model, **options, golden=wrong)
    with pytest.raises(RuntimeFailure, match=r"model\.gguf is missing. Compress the model with --engine-only llamacpp"):
        LlamaCppGenerator(tmp_path / "model.onnx", **options)
    (tmp_path / "model.gguf").write_bytes(model.with_suffix(".gguf").read_bytes()[:5000])
    with pytest.raises(RuntimeFailure, match="does not read"):
        LlamaCppGenerator(tmp_path / "model.onnx", **options)
    monkeypatch.setattr(llamacpp_library, "VERSION", "2026.1.1")
    with pytest.raises(RuntimeFailure, match=r"version 2026\.1\.1 is the one that can be used. Type: pip install"):
        LlamaCppGenerator(model, **options)


def test_a_session_reads_texts_on_and_whole(llama: TinyLlama, model: Path) -> None:
    (prompt,) = draw_prompts(VOCABULARY, (150,))
    ids = np.array([prompt, prompt[::-1]])
    expected = torch.stack([llama.predict(row) for row in ids.tolist()]).numpy()
    with LlamaCpp().open(model) as session:
        past = np.zeros((2, 1, 0, 16), np.float32)
        whole = session.run({"input_ids": ids, "past.0": past})
        assert np.abs(whole["logits"] - expected).max() < 5 * PRECISE
        begun = session.run({"input_ids": ids[:, :10], "past.0": past})
        rest = session.run({"input_ids": ids[:, 10:], "past.0": begun["present.0"]})
        assert np.abs(rest["logits"] - expected[:, 10:]).max() < 5 * PRECISE
        with pytest.raises(RuntimeFailure, match="other texts in its cache"):
            session.run({"input_ids": ids, "past.0": begun["present.0"]})
    assert [len(pieces) for pieces in cut_batches(3, 0, 30)] == [2, 1]


@pytest.fixture(scope="module")
def recipe(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe that makes the chat model for llama.cpp."""
    open_chat_model(shared)
    data = tmp_path_factory.mktemp("data") / "texts.jsonl"
    texts = [*(render(*pair) for pair in ANSWERS.items()), *(COUNT * number for number in range(1, 30))]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    stages = [{"quantize.weights": {"bits": 8, "group_size": 32}}]
    source = {"source": str(shared / "chat" / "source"), "data": str(data)}
    return {"task": "text-generation", "engine_only": "llamacpp", "stages": stages, "goal": {"fidelity": 0.9}} | source


@pytest.fixture(scope="module")
def artifact(shared: Path, recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("artifacts") / "chat.laconic"
    return export(Recipe.parse(recipe), path, cache=Cache(shared / "cache")).artifact


def test_an_artifact_is_judged_in_the_arithmetic_of_llamacpp(artifact: Artifact) -> None:
    (placement,) = artifact.manifest.placements
    assert (placement.runtime, placement.compute) == ("llamacpp", "int8-dynamic")
    assert "model.gguf" in artifact.manifest.files
    verdict = placement.verdict
    assert verdict is not None
    engine = verdict.find_check("engine")
    assert engine is not None
    assert 0.9 < engine.figures["fidelity"] < 1, "inputs of products are rounded"
    for runtime in (None, "openvino"):
        artifact.open(runtime).close()


@pytest.mark.parametrize(
    ("runtime", "written"), [(None, ("llamacpp", "int8-dynamic")), ("openvino", ("openvino", "float32"))]
)
def test_an_artifact_is_served_by_llamacpp_or_by_whatever_is_asked_for(
    artifact: Artifact, runtime: str | None, written: tuple[str, str]
) -> None:
    with running(artifact.path, threads=1, kv_cache=1 << 20, runtime=runtime) as server:
        writer = server.app.repository.get("chat").writer
        assert writer is not None
        assert (writer.worker.job.engine, writer.worker.job.compute) == written
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for question in (EMOJI, COUNT):
                chunks = client.chat.completions.create(
                    model="chat", temperature=0, messages=[{"role": "user", "content": question}], stream=True
                )
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWERS[question]


def test_an_artifact_for_another_engine_is_built_for_llamacpp(shared: Path, tmp_path: Path) -> None:
    _, path = open_chat_model(shared)
    origin = Origin.model_validate({"source": str(path.parent / "source"), "task": "text-generation"})
    cache, changes = Cache(shared / "cache"), {"engine_only": "llamacpp"}
    built = build(path, tmp_path / "b.laconic", changes=changes, original=origin, steps=QUIET, cache=cache).artifact
    assert [each.runtime for each in built.manifest.placements] == ["llamacpp"]
    assert "model.gguf" in built.manifest.files
    original, artifact = built.measured.writing
    assert (original.engine, artifact.engine) == ("original", "llamacpp, int8-dynamic")
    built.open().close()


def test_without_llamacpp_its_artifact_is_written_by_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_generator("llamacpp", None) == "llamacpp"
    monkeypatch.setattr(loader, "is_installed", lambda name: name != "llamacpp")
    assert choose_generator("llamacpp", None) == "openvino"
    assert choose_generator("openvino", "llamacpp") == "llamacpp", "asked for, so that what is missing is said"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"int8_kv_cache": True}, RuntimeFailure, "Leave out int8_kv_cache"),
        (
            {"stages": [{"quantize.weights": {"bits": 8, "group_size": 16}}]},
            FormatRefused,
            "blocks of 32 do not divide",
        ),
    ],
)
def test_what_llamacpp_cannot_keep_as_it_is_is_refused(
    shared: Path,
    recipe: dict[str, Any],
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[LaconicError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        export(Recipe.parse(recipe | changes), tmp_path / "a.laconic", cache=Cache(shared / "cache"))
    assert not (tmp_path / "a.laconic").exists()
