"""Both engines together: which request is written by which, and a model with a window over HTTP."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_models import CONTEXT, make_tokenizer, open_chat_model
from language_models import WINDOW, save
from served import running
from test_generator import finish
from tiny_decoders import open_tiny_decoder
from transformers import AutoModelForCausalLM

from export.pipeline import export
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.golden_tokens import choose_golden_tokens
from laconic.artifacts.manifest import MANIFEST
from laconic.cache import Cache
from laconic.errors import InputError, Overloaded, RuntimeFailure, UsageError
from laconic.hashing import digest_file
from laconic.recipes.recipe import Recipe
from laconic.runtimes.generator import GenerationRequest, Sampling, TokenEvent
from serve.generation.generation_job import GenerationJob
from serve.generation.generation_worker import GenerationWorker
from serve.generation.token_stream import TokenEvents, read_event
from serve.model_repository.loader import find_prefix_file

pytest.importorskip("openvino_genai")
pytest.importorskip("llguidance")
from laconic.runtimes import decoder_opening
from laconic.runtimes.grammar import grammar_of_schema
from laconic.runtimes.openvino_genai import OpenVinoGenAi
from laconic.runtimes.openvino_generator import OpenVinoGenerator

DIGITS = "start: /[0-9]{4}/"


@pytest.fixture(scope="module")
def artifact(shared: Path) -> Path:
    return open_chat_model(shared)[1]


@pytest.fixture
def generator(artifact: Path) -> Iterator[OpenVinoGenerator]:
    with OpenVinoGenerator(
        artifact / "model.onnx", context=CONTEXT, cache_bytes=1 << 20, tokenizer=artifact / "tokenizer.json"
    ) as generator:
        yield generator


def test_other_requests_go_on_while_the_decoder_is_opened(generator: OpenVinoGenerator) -> None:
    generator.add(GenerationRequest(1, (3, 80), Sampling(150)))
    generator.add(GenerationRequest(2, (3, 80), Sampling(8, grammar=DIGITS, stop_token_ids=(1,))))
    assert generator.ledger.used == 6
    order = []
    while not generator.is_idle:
        order += [event.request_id for event in generator.step()]
    assert order.index(2) > 3, "it took some steps of the others to open it"
    assert (order.count(1), order.count(2)) == (150, 4)
    assert generator.ledger.used == 0
    for number in range(2):
        generator.add(GenerationRequest(number, (3, 80), Sampling(5, top_logprobs=2 * number)))
    texts, _ = finish(generator)
    assert texts[0, 0] == texts[1, 0]


def test_what_is_cancelled_before_the_decoder_is_open_ends(generator: OpenVinoGenerator) -> None:
    generator.add(GenerationRequest(1, (3, 80), Sampling(8, grammar=DIGITS)))
    generator.cancel(1)
    assert finish(generator)[1][1, 0].finish_reason == "cancelled"


def test_a_decoder_that_does_not_open_fails_what_needs_it_and_nothing_else(
    generator: OpenVinoGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise RuntimeFailure(f"OpenVINO refuses {path.name}")

    with monkeypatch.context() as patch:
        patch.setattr(decoder_opening, "read_batched", refuse)
        generator.add(GenerationRequest(1, (3, 80), Sampling(8, grammar=DIGITS, n=2)))
        generator.add(GenerationRequest(2, (3, 80), Sampling(100)))
        texts, last = finish(generator)
    for choice in range(2):
        assert last[1, choice].finish_reason == "failed"
        assert last[1, choice].error.endswith("cannot be opened: OpenVINO refuses model.onnx")
    assert len(texts[2, 0]) == 100
    generator.add(GenerationRequest(3, (3, 80), Sampling(8, grammar=DIGITS)))
    assert len(finish(generator)[0][3, 0]) == 4, "it is tried again"


def test_an_engine_that_writes_other_tokens_than_the_artifact_says_is_not_used(artifact: Path) -> None:
    loaded = Artifact.load(artifact)
    golden = choose_golden_tokens(loaded.golden(loaded.manifest.placements[0]))
    assert len(golden) > 8
    options: Any = {"context": CONTEXT, "cache_bytes": 1 << 20, "golden": golden}
    with OpenVinoGenerator(artifact / "model.onnx", **options) as generator:
        assert generator.note == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenVinoGenAi, "step", write_wrongly)
        with OpenVinoGenerator(artifact / "model.onnx", **options) as generator:
            assert "golden tokens differ with paged attention" in generator.note
            generator.add(GenerationRequest(1, golden[0].prompt, Sampling(1)))
            assert finish(generator)[0][1, 0] == [golden[0].token]
    wrong = [replace(each, token=0) for each in golden]
    with pytest.raises(RuntimeFailure, match="golden tokens differ"):
        OpenVinoGenerator(artifact / "model.onnx", context=CONTEXT, cache_bytes=1 << 20, golden=wrong)


def write_wrongly(engine: OpenVinoGenAi, step: Any = OpenVinoGenAi.step) -> list[TokenEvent]:
    return [replace(event, token_ids=(0,) * len(event.token_ids)) for event in step(engine)]


def test_both_engines_share_a_ledger_and_the_decoder_holds_less(generator: OpenVinoGenerator) -> None:
    capacity = generator.ledger.total
    long = (3,) * 200
    with pytest.raises(InputError, match="exceed the cache of"):
        generator.add(GenerationRequest(1, long, Sampling(40, n=10, top_logprobs=1)))
    for number in range(capacity // 8):
        generator.add(GenerationRequest(number, long, Sampling(40, presence_penalty=0.5 * (number % 2))))
    with pytest.raises(Overloaded):
        generator.add(GenerationRequest(100, long, Sampling(40, top_logprobs=1)))
    assert len(finish(generator)[0]) == capacity // 8


@pytest.mark.parametrize("changes", [{"window": 16}, {"has_bias": True}, {"cap": 5.0}])
def test_attention_that_cannot_be_paged_is_stepped(changes: dict[str, Any], shared: Path) -> None:
    decoder, path = open_tiny_decoder(shared, **changes)
    prompts = ((1, 2, 3), (4,) * 30)
    with OpenVinoGenerator(path, context=512, cache_bytes=1 << 20) as generator:
        for number, prompt in enumerate(prompts):
            generator.add(GenerationRequest(number, prompt, Sampling(30)))
        texts, _ = finish(generator)
    assert [texts[number, 0] for number in range(2)] == [decoder.write_greedily(list(each), 30) for each in prompts]


def test_attention_of_another_form_is_refused(shared: Path) -> None:
    _, path = open_tiny_decoder(shared, is_causal=False)
    with pytest.raises(RuntimeFailure, match="not causal"):
        OpenVinoGenerator(path, context=512, cache_bytes=1 << 20)


def test_a_worker_writes_by_a_schema_beside_others(artifact: Path) -> None:
    job = GenerationJob(
        engine="openvino",
        model=str(artifact / "model.onnx"),
        tokenizer=str(artifact / "tokenizer.json"),
        manifest=str(artifact / MANIFEST),
        digest=digest_file(artifact / MANIFEST).sha256,
        context=CONTEXT,
        cache_bytes=1 << 20,
        threads=1,
        compute="float32",
    )
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    limited = schema | {"additionalProperties": False}
    worker = GenerationWorker.open(job, watchdog=30, crashes=1, most_waiting=8)

    async def write(sampling: Sampling) -> tuple[list[int], list[Any]]:
        events: TokenEvents = asyncio.Queue()
        await worker.begin((3, 80), sampling, 60, events)
        tokens: list[int] = []
        likeliest: list[Any] = []
        while True:
            event = read_event(await events.get())
            tokens += event.token_ids
            likeliest += event.top_logprobs
            if event.finish_reason is not None:
                return tokens, likeliest

    async def write_all() -> list[Any]:
        return await asyncio.gather(
            write(Sampling(100)),
            write(Sampling(200, stop_token_ids=(1,), grammar=grammar_of_schema(limited))),
            write(Sampling(3, logprobs=True, top_logprobs=2, logit_bias=((77, 100.0),))),
            write(Sampling(3, grammar='start: "a" <|nobody|>')),
            return_exceptions=True,
        )

    try:
        plain, by_schema, biased, refused = asyncio.run(write_all())
    finally:
        worker.close()
    assert len(plain[0]) == 100
    assert isinstance(json.loads(make_tokenizer().decode(by_schema[0]))["ok"], bool)
    assert biased[0] == [77] * 3
    assert [len(likeliest) for likeliest in biased[1]] == [2, 2, 2]
    assert isinstance(refused, InputError)


def test_a_model_with_a_window_and_caps_is_served(shared: Path, tmp_path: Path) -> None:
    source = save(tmp_path / "source", "gemma2")
    path = tmp_path / "windows.laconic"
    recipe = {"source": str(source), "task": "text-generation", "stages": [], "engine_only": "openvino"}
    export(Recipe.parse(recipe), path, cache=Cache(shared / "cache"))
    prompt = np.random.default_rng(0).integers(5, 30, 5 * WINDOW).tolist()
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.inference_mode():
        written = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    options: dict[str, Any] = {"threads": 1, "kv_cache": 1 << 20, "prefix_cache": tmp_path / "prefixes"}
    with running(path, **options) as server, server.client() as client:
        request = {"model": "windows", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer, again = (client.post("/v1/completions", json=request, timeout=60).json() for _ in range(2))
        metrics = client.get("/metrics").text
        task: Any = server.app.repository.get("windows").artifact.task()
    (kept,) = (tmp_path / "prefixes").iterdir()
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(UsageError, match="Give another one to --prefix-cache"):
        find_prefix_file(kept, "digest")
    with running(path, **options) as server, server.client() as client:
        restarted = client.post("/v1/completions", json=request, timeout=60).json()
    tokens = [token for token in written[0, len(prompt) :].tolist() if token != 3]
    assert answer["usage"]["completion_tokens"] == len(written[0]) - len(prompt)
    assert again["choices"] == restarted["choices"] == answer["choices"]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (answer, again, restarted)]
    assert cached == [0, 32, 32], "whole blocks of a prompt of 40 tokens"
    assert 'laconic_generation_cached_tokens_total{model="windows",version="1"} 32' in metrics
    drafts = re.findall(
        r'laconic_generation_draft_tokens_total\{model="windows",version="1",kind="(\w+)"\} (\d+)', metrics
    )
    assert [kind for kind, _ in drafts] == ["proposed", "accepted"]
    assert int(drafts[0][1]) >= int(drafts[1][1]) > 0
    assert answer["choices"][0]["text"].strip() == task.tokenizer.decode(tokens).strip()
