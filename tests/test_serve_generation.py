"""Language models over OpenAI's routes: asked by its own client, left by clients, and when their engine dies."""

import asyncio
import json
import os
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from artifacts import write_artifact
from chat_models import ANSWERS, CONTEXT, COUNT, EMOJI, make_tokenizer, open_chat_model, render
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from schemathesis import GenerationMode
from served import Running, eventually, running
from test_serve_openapi import try_requests

from serve.generation.generation_worker import GenerationWorker
from serve.observation.tracing import Tracing
from serve.welcome import format_example

pytest.importorskip("openvino_genai")

GREEDY: dict[str, Any] = {"model": "chat", "temperature": 0}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "number of things"}}}
WILD: dict[str, Any] = {"model": "chat", "temperature": 2.0, "seed": 5}


@pytest.fixture(scope="module")
def artifact(shared: Path) -> Path:
    return open_chat_model(shared)[1]


@pytest.fixture(scope="module")
def server(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    other = write_artifact(tmp_path_factory.mktemp("artifacts") / "twice.laconic")
    with running(artifact, other, threads=1, kv_cache=1 << 20) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with make_client(server) as client:
        yield client


def make_client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def worker_of(server: Running) -> GenerationWorker:
    writer = server.app.repository.get("chat").writer
    assert writer is not None
    return writer.worker


def ask(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("question", ANSWERS)
def test_a_chat_is_answered_whole_and_in_pieces(client: openai.OpenAI, question: str) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=ask(question))
    (choice,) = whole.choices
    assert (choice.message.content, choice.message.role) == (ANSWERS[question], "assistant")
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    written = len(ANSWERS[question].encode()) + 1  # a token a byte, and the end
    read = len(question.encode()) + 3
    usage = whole.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (read, written, read + written)
    chunks = list(
        client.chat.completions.create(
            **GREEDY, messages=ask(question), stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    first, *middle, last, end = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    pieces = [chunk.choices[0].delta.content for chunk in middle]
    assert all(pieces)
    assert "".join(map(str, pieces)) == ANSWERS[question]
    assert {chunk.choices[0].finish_reason for chunk in (first, *middle)} == {None}
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("stop", None)
    assert (end.choices, end.usage) == ([], usage)
    assert {chunk.usage for chunk in chunks[:-1]} == {None}


def test_a_stream_is_server_sent_events_and_ends_with_done(server: Running) -> None:
    request = GREEDY | {"messages": ask(COUNT), "stream": True, "max_tokens": 3}
    with server.client() as http, http.stream("POST", "/v1/chat/completions", json=request) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""}, *({"content": letter} for letter in "one"), {},
    ]  # fmt: skip
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("stop", "shown", "tokens"),
    [
        ("four five", "one two three ", 23),
        (["nine", "three "], "one two ", 14),
        ("zzz", ANSWERS[COUNT], len(ANSWERS[COUNT]) + 1),
        ("o", "", 1),
    ],
)
def test_an_answer_ends_before_a_stop_string_of_several_tokens(
    client: openai.OpenAI, stop: Any, shown: str, tokens: int
) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=ask(COUNT), stop=stop)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (shown, "stop")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == tokens
    chunks = client.chat.completions.create(**GREEDY, messages=ask(COUNT), stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == shown


def test_several_choices_by_a_seed_are_the_same_again_and_beside_others(server: Running) -> None:
    async def write() -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            request = WILD | {"messages": ask(COUNT), "n": 3, "max_tokens": 20}
            alone = await client.chat.completions.create(**request)
            others = [client.chat.completions.create(**request | {"seed": seed}) for seed in range(6)]
            answers = [alone, *await asyncio.gather(client.chat.completions.create(**request), *others)]
            chunks: list[str] = ["", "", ""]
            async for chunk in await client.chat.completions.create(**request, stream=True):
                for choice in chunk.choices:
                    chunks[choice.index] += choice.delta.content or ""
            return [chunks, *([str(choice.message.content) for choice in answer.choices] for answer in answers)]

    streamed, alone, together, *others = asyncio.run(write())
    assert streamed == alone == together
    assert len(set(alone)) == 3
    assert together not in others[:5]
    assert together == others[5], "its seed is 5"


def test_the_probabilities_of_tokens_come_with_their_bytes(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=ask(EMOJI), logprobs=True, top_logprobs=0, max_tokens=12)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes(byte for each in logprobs.content for byte in each.bytes or ()).decode() == "The cat 😀"
    assert all(-0.5 < each.logprob <= 0 for each in logprobs.content)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("The cat 😀", "length")
    request = GREEDY | {"messages": ask(EMOJI), "max_tokens": 12}
    chunks = list(client.chat.completions.create(**request, logprobs=True, stream=True))
    streamed = [each for chunk in chunks if (part := chunk.choices[0].logprobs) for each in part.content or ()]
    assert streamed == logprobs.content


def test_a_text_or_its_tokens_are_continued(client: openai.OpenAI, server: Running) -> None:
    prompt = render(COUNT) + "one two"
    text = client.completions.create(**GREEDY, prompt=prompt, logprobs=0)
    (choice,) = text.choices
    assert (choice.text, choice.finish_reason) == (" three four five six seven eight nine ten", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*choice.text, "<|end|>"]
    assert choice.logprobs.text_offset == list(range(len(choice.text) + 1))
    assert text.usage is not None
    writer = server.app.repository.get("chat").writer
    assert writer is not None
    tokens = list(writer.encode_text(prompt))
    assert text.usage.prompt_tokens == len(tokens)
    for same in (tokens, [tokens], [prompt]):
        assert client.completions.create(**GREEDY, prompt=same).choices[0].text == choice.text
    pieces = list(client.completions.create(**GREEDY, prompt=prompt, stream=True, n=2))
    for index in range(2):
        mine = [each for piece in pieces for each in piece.choices if each.index == index]
        assert "".join(each.text for each in mine) == choice.text
        assert [each.finish_reason for each in mine] == [None] * (len(mine) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("changes", "parameter", "code", "message"),
    [
        ({"messages": ask("x" * CONTEXT)}, None, "context_length_exceeded", f"context is {CONTEXT} tokens"),
        ({"max_tokens": CONTEXT}, None, "context_length_exceeded", "up to 256 new ones"),
        ({"messages": [{"role": "pirate", "content": "a"}]}, "messages", None, "refuses the chat: unknown role"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages", None, "the model reads texts alone"),
        ({"model": "twice"}, "model", None, "does tensors, and writes no texts"),
        ({"best_of": 5}, "best_of", None, "unknown parameter"),
        ({"tools": [TOOL]}, "tools", None, "the model's chat template does not read 'tools'"),
        ({"messages": [CALLED]}, "messages", None, "knows no calls of tools in messages"),
        ({"response_format": SCHEMA}, "response_format", None, "cannot be compiled: Invalid type: number of things"),
        ({"n": 128, "max_tokens": 200}, None, None, "for each of 128 choices exceed the cache"),
    ],
)
def test_a_request_that_does_not_fit_is_told_so_in_a_sentence(
    server: Running, changes: dict[str, Any], parameter: str | None, code: str | None, message: str
) -> None:
    for stream in (False, True):
        with server.client() as http:
            request = GREEDY | {"messages": ask(COUNT), "stream": stream} | changes
            answer = http.post("/v1/chat/completions", json=request)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert message in error["message"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", parameter, code)
    assert worker_of(server).admission.ledger.used == 0


def test_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["chat", "twice"]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="chta", messages=ask("a"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**GREEDY, prompt=[10**6])
    assert refused.value.param == "prompt"


def test_other_routes_know_the_model_too(server: Running) -> None:
    with server.client() as http:
        assert http.get("/v2/models/chat").json()["name"] == "chat"
        assert http.get("/v2/models/chat/ready").status_code == 200
        assert http.get("/v2/models/stats").status_code == 200
        paths = http.get("/openapi.json").json()["paths"]
        request = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert request["properties"]["model"]["enum"] == ["chat"]
        assert "/v1/completions" in paths
        assert http.get("/v1/completions").status_code == 405
        metrics = http.get("/metrics").text
    for name in (
        'tokens_total{model="chat",version="1",kind="generated"}',
        'requests{model="chat",version="1",state="waiting"} 0',
        'cache_blocks{model="chat",version="1",state="total"} 64',
        "first_token_seconds_count",
        "between_tokens_seconds_bucket",
    ):
        assert f"laconic_generation_{name}" in metrics


@pytest.mark.sweep("negative")
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_requests_made_from_the_description_get_documented_answers(server: Running, mode: GenerationMode) -> None:
    statuses = try_requests(server.url, mode, 40, "completions") + try_requests(server.url, mode, 20, "/generate")
    assert set(statuses) <= {200, 400, 404, 405, 413, 415}
    assert worker_of(server).running == 0


def test_the_line_for_a_ready_server_shows_a_chat(server: Running) -> None:
    model = server.app.repository.get("chat")
    example = format_example(model, server.url, key=False)
    command, *arguments = shlex.split(example)
    assert (command, arguments[:2]) == ("curl", ["-N", f"{server.url}/v1/chat/completions"])
    with server.client() as http:
        assert http.post(arguments[1], content=arguments[-1]).text.endswith("data: [DONE]\n\n")


def test_a_trace_says_when_a_request_waited_was_read_and_was_written(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, provider, observer = InMemorySpanExporter(), TracerProvider(), server.app.observer
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(observer, "tracing", Tracing(provider))
    monkeypatch.setattr(observer, "active", True)
    for stream in (False, True):
        spans.clear()
        request = GREEDY | {"messages": ask(COUNT), "stream": stream, "n": 2, "max_tokens": 9}
        with server.client() as http:
            assert http.post("/v1/chat/completions", json=request).status_code == 200
        assert eventually(lambda: any(span.parent is None for span in spans.get_finished_spans()))
        steps = {span.name: span for span in spans.get_finished_spans()}
        root = steps.pop("POST /v1/chat/completions")
        assert list(steps) == ["encode", "queue", "prefill", "decode"]
        ends = [end for step in steps.values() for end in (step.start_time, step.end_time)]
        assert [root.start_time <= ends[0], *map(int.__le__, ends, ends[1:]), ends[-1] <= root.end_time] == [True] * 9
        assert steps["prefill"].attributes == {"laconic.prompt_tokens": len(COUNT) + 3}
        assert steps["decode"].attributes == {"laconic.generated_tokens": 18}


@pytest.mark.parametrize(
    "limits", [{"top_p": 5e-324}, {"temperature": 5e-324}, {"min_p": 5e-324}, {"top_k": 2**31 - 1}, {"seed": -1}]
)
def test_settings_at_the_ends_of_their_ranges_do_not_end_the_engine(client: openai.OpenAI, limits: Any) -> None:
    extra = {"temperature": 1.0, "max_tokens": 5} | limits
    answer = client.chat.completions.create(model="chat", messages=ask(COUNT), extra_body=extra)
    assert answer.choices[0].finish_reason == "length"


def hang_up(server: Running, *, stream: bool) -> None:
    """Ask for many tokens, and leave after the first part of the answer, if it is a stream."""
    body = json.dumps(WILD | {"messages": ask(COUNT), "n": 8, "max_tokens": 200, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if stream:
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        else:
            assert eventually(lambda: worker_of(server).running > 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(server: Running, stream: bool) -> None:
    worker = worker_of(server)
    written = worker.statistics.generated_tokens
    hang_up(server, stream=stream)
    assert eventually(lambda: worker.admission.ledger.used == 0 and worker.running == 0)
    assert worker.statistics.generated_tokens - written < 8 * 200
    failures = server.app.repository.get("chat").statistics.failures
    assert eventually(lambda: failures["CANCELED"] > 0)
    with make_client(server) as client:
        assert client.chat.completions.create(**GREEDY, messages=ask(COUNT)).choices[0].finish_reason == "stop"


def test_an_engine_that_dies_ends_its_own_requests_and_is_started_again(artifact: Path, tmp_path: Path) -> None:
    other = write_artifact(tmp_path / "twice.laconic")
    with running(artifact, other, threads=1) as server, make_client(server) as client:
        stream = client.chat.completions.create(**WILD, messages=ask(COUNT), n=8, max_tokens=200, stream=True)
        next(iter(stream))
        worker = worker_of(server)
        pid = worker.process
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine stopped while it wrote this answer"):
            list(stream)
        with server.client() as http:
            assert http.post("/v1/models/twice/predict", json={"inputs": {"x": [1, 2, 3]}}).status_code == 200
        assert eventually(lambda: worker.process not in (None, pid) and not worker.reason, seconds=30)
        answer = client.chat.completions.create(**GREEDY, messages=ask(EMOJI))
        assert answer.choices[0].message.content == ANSWERS[EMOJI]
        assert worker.admission.ledger.used == 0


def test_many_clients_at_once_get_their_own_answers(server: Running) -> None:
    async def write() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(question: str) -> str:
                chunks = await client.chat.completions.create(**GREEDY, messages=ask(question), stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            return await asyncio.gather(*map(one, [EMOJI, COUNT] * 50))

    assert asyncio.run(write()) == [ANSWERS[EMOJI], ANSWERS[COUNT]] * 50
    worker = worker_of(server)
    assert (worker.running, worker.admission.waiting, worker.admission.ledger.used) == (0, 0, 0)


def test_what_must_wait_waits_and_what_may_not_is_told_when_to_come_back(artifact: Path) -> None:
    block = 32 * 4 * 2 * 16 * 4  # bytes
    with running(artifact, threads=1, kv_cache=4 * block, max_waiting=1) as server, make_client(server) as client:
        assert worker_of(server).admission.ledger.total == 4
        with pytest.raises(openai.BadRequestError, match="exceed the cache of 128 tokens"):
            client.chat.completions.create(**GREEDY, messages=ask(COUNT), max_tokens=200)

        async def flood() -> list[Any]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                request = WILD | {"messages": ask(COUNT), "max_tokens": 100}
                asked = (client.chat.completions.create(**request) for _ in range(6))
                return await asyncio.gather(*asked, return_exceptions=True)

        answers = asyncio.run(flood())
        refused = [each for each in answers if isinstance(each, openai.RateLimitError)]
        assert 0 < len(refused) <= 4
        assert all(int(each.response.headers["retry-after"]) >= 1 for each in refused)
        written = {each.choices[0].message.content for each in answers if not isinstance(each, Exception)}
        assert len(written) == 1
        assert len(refused) + sum(not isinstance(each, Exception) for each in answers) == len(answers)


def test_a_stream_that_the_end_of_the_server_cuts_says_so(artifact: Path) -> None:
    with running(artifact, threads=1, grace=0.0) as server:
        worker = worker_of(server)
        pid = worker.process
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # the engine writes no further
        request = GREEDY | {"messages": ask(COUNT), "stream": True}
        with server.client() as http, http.stream("POST", "/v1/chat/completions", json=request) as answer:
            lines = answer.iter_lines()
            assert "assistant" in next(lines)
            server.stop()
            text = "\n".join(lines)
    assert "the server stopped before this answer was whole" in text
    assert "[DONE]" not in text


def test_an_echo_has_the_scores_of_its_prompt(shared: Path, server: Running, client: openai.OpenAI) -> None:
    """lm-evaluation-harness reads likelihoods from it, all but the last, which it takes for that of the one new token:
    behind the last prompt that is the end of the answer, which has no text."""
    model, _ = open_chat_model(shared)
    tokenizer = make_tokenizer()
    whole = tokenizer.encode(render(COUNT, ANSWERS[COUNT])).ids[:-1]
    prompts = [tokenizer.encode(render("say b")).ids, [3, 80, 77, *range(20, 40)] * 11, whole]
    for most in (0, 1):
        answer = client.completions.create(
            model="chat", prompt=prompts, echo=True, logprobs=2, max_tokens=most, temperature=0
        )
        for choice, prompt in zip(answer.choices, prompts, strict=True):
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                scores = model(input_ids=ids).logits[0].log_softmax(-1)
            expected = scores[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
            scored = choice.logprobs
            assert scored is not None
            first, *logprobs = scored.token_logprobs or []
            assert first is None
            assert logprobs[: len(expected)] == pytest.approx(expected, abs=1e-3)
            assert (scored.top_logprobs or [])[0] is None
            best = [max(each.values()) for each in (scored.top_logprobs or [])[1 : len(prompt)]]
            assert best == pytest.approx(scores[:-1].max(-1).values.tolist(), abs=1e-3)
            offsets = scored.text_offset or []
            assert offsets == sorted(offsets)
            assert offsets[-1] <= len(choice.text)
            assert len(offsets) == len(scored.tokens or []) == len(prompt) + most
        end = answer.choices[-1]
        assert end.logprobs is not None
        assert (end.text, end.finish_reason) == (tokenizer.decode(whole), "stop" if most else "length")
        assert (end.logprobs.tokens or [])[len(whole) :] == ["<|end|>"] * most
        assert answer.usage is not None
        assert answer.usage.completion_tokens == most * len(prompts)
