"""The engine that steps a decoder itself: attention that cannot be paged, rows that come and go, settings that need all
scores."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_models import ANSWERS, CONTEXT, COUNT, make_tokenizer, open_chat_model, render
from language_models import WINDOW, mark_swept, open_decoder
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from test_generator import draw_prompts, finish
from transformers import AutoModelForCausalLM

from laconic.errors import InputError, RuntimeFailure
from laconic.runtimes.generator import GenerationRequest, Sampling, TokenEvent

pytest.importorskip("openvino_genai")
pytest.importorskip("llguidance")
from laconic.runtimes.draft_file import DraftFile
from laconic.runtimes.grammar import grammar_of_schema
from laconic.runtimes.openvino_decoder import COPIES, OpenVinoDecoder
from laconic.runtimes.prefix_cache import PrefixCache
from laconic.runtimes.prompt_lookup import PromptLookup

VOCABULARY, SPACE = 40, 128
CACHE = 1 << 20
LEAVING = (1, 2)
"""Requests that are cancelled when they have three tokens."""


FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "gpt2", "bloom", "opt", "mixtral")


@pytest.fixture(scope="module", params=mark_swept(*FAMILIES))
def family(request: pytest.FixtureRequest, shared: Path) -> tuple[Any, Path]:
    """A model of a family, and the file of its decoder."""
    source, decoder = open_decoder(shared, request.param)
    return AutoModelForCausalLM.from_pretrained(source).eval(), decoder


def write(model: Any, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """What transformers writes greedily."""
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        return list(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist())


@pytest.mark.sweep("opt")
def test_rows_that_come_and_go_write_what_transformers_writes(family: tuple[Any, Path]) -> None:
    """Requests of any length are begun, cancelled and ended at random while others are written, beyond every window."""
    model, path = family
    rng = np.random.default_rng(1)
    lengths = [1, 2, 3 * WINDOW, 70, *rng.integers(1, 60, 14).tolist()]
    prompts = draw_prompts(VOCABULARY, lengths)
    limits = [24, 40, 30, 24, *rng.integers(1, 50, 14).tolist()]
    expected = [write(model, *pair)[len(pair[0]) :] for pair in zip(prompts, limits, strict=True)]
    assert len({tuple(text) for text in expected}) > 10
    texts: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], TokenEvent] = {}
    with OpenVinoDecoder(path, context=SPACE, cache_bytes=CACHE) as generator:
        waiting = list(range(len(prompts)))
        while waiting or not generator.is_idle:
            for number in waiting[: int(rng.integers(0, 3))]:
                request = GenerationRequest(number, prompts[number], Sampling(limits[number], n=1 + number % 2))
                if generator.ledger.has_room(request):
                    generator.add(request)
                    waiting.remove(number)
            for number in LEAVING:
                if len(texts.get((number, 0), ())) >= 3:
                    generator.cancel(number, 0)
            for event in generator.step():
                texts.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
                ends[event.request_id, event.choice] = event
        assert generator.ledger.used == 0
    for (number, choice), text in texts.items():
        is_cancelled = number in LEAVING and choice == 0
        assert ends[number, choice].finish_reason == ("cancelled" if is_cancelled else "length")
        assert text == expected[number][: 3 if is_cancelled else None]


def test_a_window_is_seen_by_prompts_in_pieces(family: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = family
    monkeypatch.setattr("laconic.runtimes.generator.PIECE", 13)
    prompt = 3 * draw_prompts(VOCABULARY, (20,))[0]
    with OpenVinoDecoder(path, context=SPACE, cache_bytes=CACHE) as generator:
        generator.add(GenerationRequest(1, prompt, Sampling(20)))
        steps = 0
        while not generator.step():
            steps += 1
        assert steps == 60 // 13
        assert finish(generator)[0][1, 0] == write(model, prompt, 20)[61:]


def test_a_beginning_that_was_read_is_not_computed_again(
    family: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are those of transformers, behind prompts of running and of finished requests, and behind their answers."""
    model, path = family
    begin, *ends = draw_prompts(VOCABULARY, (70, 3, 9, 1))
    prompts = [(*begin, *ends[0]), (*begin, *ends[1]), (*begin[:40], *ends[2])]
    expected = [write(model, prompt, 25)[len(prompt) :] for prompt in prompts]
    prompts.append((*prompts[0], *expected[0], 7))
    expected.append(write(model, prompts[3], 12)[len(prompts[3]) :])
    for has_cache in (True, False):
        if not has_cache:
            monkeypatch.setattr(PrefixCache, "find", lambda *_: (0, []))
        texts: list[list[int]] = [[], [], [], []]
        cached: dict[int, int | None] = {}
        with OpenVinoDecoder(path, context=SPACE, cache_bytes=CACHE) as generator:
            generator.add(GenerationRequest(0, prompts[0], Sampling(25)))
            while not generator.is_idle:
                for event in generator.step():
                    number = event.request_id
                    texts[number] += event.token_ids
                    cached.setdefault(number, event.cached_tokens)
                    if number == 0 and len(texts[0]) == 3:
                        generator.add(GenerationRequest(1, prompts[1], Sampling(25)))
                    if event.finish_reason is not None and number != 1 and number < 3:
                        following = 2 if number == 0 else 3
                        generator.add(
                            GenerationRequest(following, prompts[following], Sampling(len(expected[following])))
                        )
        assert texts == expected
        assert cached == ({0: 0, 1: 64, 2: 32, 3: 96} if has_cache else dict.fromkeys(range(4), 0))


@pytest.fixture(scope="module")
def chat(shared: Path) -> tuple[Any, Path]:
    model, artifact = open_chat_model(shared)
    return model, artifact


def test_the_prefix_cache_outlives_the_engine_of_one_model_alone(
    chat: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (prompt,), kept = draw_prompts(261, (100,)), tmp_path / "kept.safetensors"

    def write_once(file: Path, model: str = "digest", cache_bytes: int = 8 << 20) -> tuple[list[int], int | None]:
        with OpenVinoDecoder(chat[1] / "model.onnx", context=CONTEXT, cache_bytes=cache_bytes) as generator:
            generator.load_prefixes(file, model)
            generator.add(GenerationRequest(1, prompt, Sampling(12)))
            (event,) = generator.step()
            text, _ = finish(generator)
            generator.save_prefixes()
        return [*event.token_ids, *text[1, 0]], event.cached_tokens

    expected, cached = write_once(kept)
    assert cached == 0
    damages = {name: tmp_path / name for name in ("whole", "cut", "renamed", "broken", "empty", "short")}
    for path in damages.values():
        path.write_bytes(kept.read_bytes())
    damages["cut"].write_bytes(kept.read_bytes()[:-1])
    damages["empty"].write_bytes(b"")
    with safe_open(kept, "numpy") as file:
        metadata, names = file.metadata(), file.keys()
        arrays = {name: file.get_tensor(name) for name in names}
    save_file(arrays | {"past.1": arrays["past.1"] * np.float32(np.nan)}, damages["broken"], metadata)
    save_file(arrays | {"past.1": arrays["past.1"][:, :1]}, damages["short"], metadata)
    assert {name: write_once(path, "digest" if name != "renamed" else "other") for name, path in damages.items()} == {
        name: (expected, 96 if name == "whole" else 0) for name in damages
    }
    assert sum("is of no use, so that no prefix is cached yet" in each.message for each in caplog.records) == 5
    assert write_once(damages["cut"]) == (expected, 96), "a file that is of no use is replaced"
    assert len(arrays["names"]) == 3
    assert write_once(kept, cache_bytes=1 << 19)[0] == expected


@pytest.fixture
def generator(chat: tuple[Any, Path]) -> Iterator[OpenVinoDecoder]:
    path = chat[1]
    with OpenVinoDecoder(
        path / "model.onnx", context=CONTEXT, cache_bytes=8 << 20, tokenizer=path / "tokenizer.json"
    ) as generator:
        yield generator


def predict(model: Any, ids: list[int]) -> NDArray[np.float64]:
    """The logits behind a text."""
    with torch.inference_mode():
        return np.asarray(model(torch.tensor([ids])).logits[0, -1].double().numpy())


def test_the_likeliest_tokens_come_with_their_probabilities(chat: tuple[Any, Path], generator: OpenVinoDecoder) -> None:
    model = chat[0]
    prompt = (3, 80, 90)
    sampling = Sampling(8, temperature=1.5, seed=3, top_k=5, logprobs=True, top_logprobs=4)
    generator.add(GenerationRequest(1, prompt, sampling))
    ids = list(prompt)
    while not generator.is_idle:
        for event in generator.step():
            expected = torch.from_numpy(predict(model, ids)).log_softmax(-1)
            values, places = expected.topk(4)
            ((likeliest,), (token,), (logprob,)) = event.top_logprobs, event.token_ids, event.logprobs
            assert [place for place, _ in likeliest] == places.tolist()
            assert [value for _, value in likeliest] == pytest.approx(values.tolist(), abs=1e-4)
            assert logprob == pytest.approx(float(expected[token]), abs=1e-4)
            ids.append(token)
    assert len(ids) == len(prompt) + 8


def test_biases_ban_and_force_tokens(chat: tuple[Any, Path], generator: OpenVinoDecoder) -> None:
    first = int(predict(chat[0], [3, 80]).argmax())
    generator.add(GenerationRequest(1, (3, 80), Sampling(6, logit_bias=((first, -100.0),))))
    generator.add(GenerationRequest(2, (3, 80), Sampling(6, temperature=1.0, logit_bias=((77, 100.0),))))
    texts, _ = finish(generator)
    assert first not in texts[1, 0]
    assert texts[2, 0] == [77] * 6
    for bias in ((261, 1.0), (-1, 1.0)):
        with pytest.raises(InputError, match="logit_bias names token"):
            generator.add(GenerationRequest(3, (3, 80), Sampling(6, logit_bias=(bias,))))


def test_penalties_count_what_the_choice_has(chat: tuple[Any, Path], generator: OpenVinoDecoder) -> None:
    """Each score less count times frequency_penalty, and presence_penalty once: the formula of OpenAI's reference."""
    prompt = (3, 80, 90)
    ids = list(prompt)
    for _ in range(20):
        counts = np.bincount(ids[3:], minlength=261)
        ids.append(int((predict(chat[0], ids) - 2.5 * counts - 1.5 * (counts > 0)).argmax()))
    sampling = Sampling(20, frequency_penalty=2.5, presence_penalty=1.5)
    generator.add(GenerationRequest(1, prompt, sampling))
    assert finish(generator)[0][1, 0] == ids[3:]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


DRAFTED = (
    Sampling(60, stop_token_ids=(1,)),
    Sampling(60, logprobs=True, top_logprobs=2, repetition_penalty=1.02),
    Sampling(40, temperature=0.9, seed=3, top_k=8, logprobs=True),
    Sampling(40, temperature=0.5, seed=4, frequency_penalty=0.1),
    Sampling(90, stop_token_ids=(1,), grammar=grammar_of_schema(SCHEMA)),
)


def write_drafted(generator: OpenVinoDecoder) -> tuple[list[tuple[Any, ...]], list[float], list[TokenEvent]]:
    """Answers to a prompt that has the answer: tokens, likeliest ones and ends; scores; and events."""
    prompt = tuple(make_tokenizer().encode(render(COUNT, ANSWERS[COUNT]) + render(COUNT)).ids)
    answers, scores, every = [], list[float](), list[TokenEvent]()
    for number, sampling in enumerate(DRAFTED):
        generator.add(GenerationRequest(number, prompt, sampling))
        events: list[TokenEvent] = []
        while not generator.is_idle:
            events += generator.step()
        tokens = [token for event in events for token in event.token_ids]
        likeliest = [[token for token, _ in row] for event in events for row in event.top_logprobs]
        answers.append((tokens, likeliest, events[-1].finish_reason))
        scores += [score for event in events for score in event.logprobs]
        every += events
    assert all(event.drafted >= event.accepted for event in every)
    return answers, scores, every


def test_drafts_change_no_text(generator: OpenVinoDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """However tokens are chosen: the same tokens, scores and ends, in fewer steps where the prompt has the answer."""
    answers, scores, events = write_drafted(generator)
    accepted = sum(event.accepted for event in events)
    monkeypatch.setattr(PromptLookup, "propose", lambda *_: [])
    plain, plain_scores, plain_events = write_drafted(generator)
    assert answers == plain
    assert scores == pytest.approx(plain_scores, abs=1e-4)
    assert len(plain_events) == len(events) + accepted
    assert accepted > len(plain_events) / 4


@pytest.mark.parametrize("lookup", [True, False])
def test_a_draft_model_changes_no_text(
    chat: tuple[Any, Path], generator: OpenVinoDecoder, monkeypatch: pytest.MonkeyPatch, lookup: bool
) -> None:
    """Drafted by itself, the model chooses every token that it drafts greedily; several texts at once are not
    drafted."""
    plain, plain_scores, _ = write_drafted(generator)
    monkeypatch.setattr("laconic.runtimes.draft_model.PIECE", 30)  # the prompt has several
    if not lookup:
        monkeypatch.setattr(PromptLookup, "propose", lambda *_: [])
    model, tokenizer = (chat[1] / name for name in ("model.onnx", "tokenizer.json"))
    draft = DraftFile(model, "float32", beats_paged=False)
    options: dict[str, Any] = {"context": CONTEXT, "cache_bytes": 8 << 20, "tokenizer": tokenizer}
    with OpenVinoDecoder(model, **options, draft=draft) as drafting:
        answers, scores, events = write_drafted(drafting)
        assert answers == plain
        assert scores == pytest.approx(plain_scores, abs=1e-4)
        greedy = [event for event in events if event.request_id == 0]
        assert sum(event.accepted for event in events) > len(events) / 2
        if not lookup:
            assert sum(event.accepted for event in greedy) == sum(event.drafted for event in greedy) > 2 * len(greedy)
        for each in (drafting, generator):
            for number in (1, 2):
                each.add(GenerationRequest(number, tuple(range(60, 70 + number)), Sampling(20)))
        texts, last = finish(drafting)
        assert texts == finish(generator)[0]
        assert not any(event.drafted for event in last.values())


def test_drafts_end_where_they_are_wrong() -> None:
    """A text that repeats nothing costs few wrong tokens, and one that begins to repeat is drafted again."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 500, 200).tolist()
    lookup = PromptLookup(tokens)
    drafted = 0
    for token in rng.integers(0, 3, 400).tolist():  # pairs occur all the time, and mean nothing
        draft = lookup.propose(8)
        drafted += len(draft)
        lookup.learn(len(draft), 0)
        tokens.append(token)
    assert 0 < drafted < 8 + 401 / 8
    accepted = 0
    source, place = tokens[20:120], 0
    while place < 100:
        draft = lookup.propose(100)
        right = 0
        while right < len(draft) and place + right < 100 and draft[right] == source[place + right]:
            right += 1
        lookup.learn(len(draft), right)
        tokens += source[place : place + right + 1]
        place += right + 1
        accepted += right
    assert accepted > 60
    assert lookup.propose(0) == []


def test_what_is_written_matches_the_schema_and_ends_with_it(generator: OpenVinoDecoder) -> None:
    tokenizer = make_tokenizer()
    grammar = grammar_of_schema(SCHEMA)
    for number in range(4):
        sampling = Sampling(240, temperature=1.0, seed=number, n=2, stop_token_ids=(1,), grammar=grammar)
        generator.add(GenerationRequest(number, (3, 80, 90), sampling))
    generator.add(GenerationRequest(4, (3, 80), Sampling(50, stop_token_ids=(1,), grammar="start: /[0-9]{3,5}/")))
    generator.add(GenerationRequest(5, (3, 80), Sampling(2, grammar='start: "abc"')))
    texts, last = finish(generator)
    for number, choice in [(number, choice) for number in range(4) for choice in range(2)]:
        value = json.loads(tokenizer.decode(texts[number, choice]))
        assert set(value) == {"name", "count"}
        assert isinstance(value["name"], str)
        assert 0 <= value["count"] <= 99
        assert last[number, choice].finish_reason == "stop"
    assert tokenizer.decode(texts[4, 0]).isdigit()
    assert last[4, 0].finish_reason == "stop"
    assert (tokenizer.decode(texts[5, 0]), last[5, 0].finish_reason) == ("ab", "length")


@pytest.mark.parametrize("grammar", ["", "start: name", 'start: "a" <|nobody|>'])
def test_what_is_no_grammar_costs_its_own_request_alone(generator: OpenVinoDecoder, grammar: str) -> None:
    generator.add(GenerationRequest(1, (3, 80), Sampling(5)))
    if grammar:
        with pytest.raises(InputError, match="cannot be compiled") as refused:
            generator.add(GenerationRequest(2, (3, 80), Sampling(5, grammar=grammar)))
        assert "\n" not in str(refused.value)
    assert len(finish(generator)[0]) == 1


def test_requests_wait_until_all_rows_fit_at_their_longest(chat: tuple[Any, Path]) -> None:
    """Short rows beside a long one are padded to its length, which the sum of their lengths does not tell."""
    block = COPIES * 32 * 2 * 2 * 2 * 16 * 4
    with OpenVinoDecoder(chat[1] / "model.onnx", context=CONTEXT, cache_bytes=8 * block) as generator:
        assert generator.ledger.total == 8
        generator.add(GenerationRequest(1, (3,) * 100, Sampling(28)))
        generator.add(GenerationRequest(2, (3, 80), Sampling(10)))
        generator.add(GenerationRequest(3, (3, 90), Sampling(10)))
        order = []
        while not generator.is_idle:
            order += [(event.request_id, event.finish_reason) for event in generator.step()]
            assert len(generator._prefixes) <= generator._count_spare(), "prefixes have what the rows leave free"
        assert order.index((2, "length")) < order.index((3, None)) < order.index((1, "length"))


def test_a_text_is_no_longer_than_the_context(generator: OpenVinoDecoder) -> None:
    with pytest.raises(InputError, match="longer than the model's context of 256 tokens"):
        generator.add(GenerationRequest(1, (3,) * 200, Sampling(57)))


def test_grammars_need_a_tokenizer(chat: tuple[Any, Path]) -> None:
    with (
        OpenVinoDecoder(chat[1] / "model.onnx", context=CONTEXT, cache_bytes=CACHE) as generator,
        pytest.raises(InputError, match="without its tokenizer"),
    ):
        generator.add(GenerationRequest(1, (3,), Sampling(5, grammar='start: "a"')))


def test_an_engine_without_a_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x00not a model")
    with pytest.raises(RuntimeFailure, match=r"cannot read model\.onnx"):
        OpenVinoDecoder(tmp_path / "model.onnx", context=CONTEXT, cache_bytes=CACHE)
