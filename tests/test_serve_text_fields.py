"""The fields of requests for text over HTTP, with an engine that writes what the test says."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_models import open_chat_model
from pydantic import BaseModel
from scripted_worker import scripted
from served import Running, eventually, running
from tool_templates import ARGUMENTS, CALLS, TEMPLATES

pytest.importorskip("openvino_genai")

HELLO: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
ONCE: dict[str, Any] = {"model": "chat", "prompt": "Once"}


@pytest.fixture(scope="module")
def server(shared: Path) -> Iterator[Running]:
    with running(open_chat_model(shared)[1], threads=1, kv_cache=1 << 20) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_penalties_and_biases_reach_the_engine(server: Running, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "frequency_penalty": 0.5, "presence_penalty": -1.0, "logit_bias": {"7": 100, "260": -100.0},
    }  # fmt: skip
    with scripted(server, "yes") as worker:
        client.chat.completions.create(**HELLO, **asked)
        client.completions.create(**ONCE, **asked)
    for request in worker.requests:
        sampling = request.sampling
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -1.0)
        assert sampling.logit_bias == ((7, 100.0), (260, -100.0))


def test_a_bias_of_a_token_that_the_model_lacks_is_refused(server: Running, client: openai.OpenAI) -> None:
    with scripted(server, "yes"), pytest.raises(openai.BadRequestError, match="names token 261") as refused:
        client.chat.completions.create(**HELLO, logit_bias={"261": 1})
    assert refused.value.param == "logit_bias"


def test_the_likeliest_tokens_of_a_chat_come_with_each_token(server: Running, client: openai.OpenAI) -> None:
    with scripted(server, "a😀") as worker:
        asked: dict[str, Any] = HELLO | {"logprobs": True, "top_logprobs": 3}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
    assert worker.requests[0].sampling.top_logprobs == 3
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [each.bytes for each in logprobs.content] == [[97], [0xF0], [0x9F], [0x98], [0x80]]
    for each in logprobs.content:
        likeliest = [(likely.token, likely.logprob) for likely in each.top_logprobs]
        assert likeliest == [("!", -0.5), ('"', -1.5), ("#", -2.5)]
    streamed = [each for chunk in chunks if (part := chunk.choices[0].logprobs) for each in part.content or ()]
    assert streamed == logprobs.content


def test_the_likeliest_tokens_of_a_text_are_dictionaries_with_the_token_itself(
    server: Running, client: openai.OpenAI
) -> None:
    with scripted(server, "a😀"):
        whole = client.completions.create(**ONCE, logprobs=2).choices[0].logprobs
        chunks = list(client.completions.create(**ONCE, logprobs=2, stream=True))
        alone = client.completions.create(**ONCE, logprobs=0).choices[0].logprobs
    assert whole is not None
    assert whole.tokens == ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80", "<|end|>"]
    assert whole.top_logprobs == [{"!": -0.5, '"': -1.5, token: -0.25} for token in whole.tokens]
    streamed = [each for chunk in chunks if (part := chunk.choices[0].logprobs) for each in part.top_logprobs or ()]
    assert streamed == whole.top_logprobs
    assert alone is not None
    assert (alone.tokens, alone.top_logprobs) == (whole.tokens, None)


def test_a_client_that_hangs_up_while_nothing_is_written_ends_its_request(server: Running) -> None:
    body = json.dumps(HELLO | {"stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    with scripted(server, "") as worker:
        worker.is_silent = True
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            received = b""
            while b"assistant" not in received:  # what is not read would reset the connection at its end
                received += connection.recv(1 << 16)
        assert eventually(lambda: worker.cancelled == [(0, None)])


TOOLS: list[Any] = [
    {"type": "function", "function": {
        "name": "weather", "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }},
    {"type": "function", "function": {"name": "time"}},
]  # fmt: skip
ASKED: dict[str, Any] = HELLO | {"tools": TOOLS, "max_tokens": 500}
"""More tokens than by default: of some families a call takes 170, since the tokenizer knows bytes alone."""


@pytest.fixture(params=sorted(TEMPLATES))
def family(request: pytest.FixtureRequest, server: Running) -> Iterator[str]:
    """A family of models, whose template the served model has."""
    writer = server.app.repository.get("chat").writer
    assert writer is not None
    before, writer.chat = writer.chat, TEMPLATES[request.param]
    yield request.param
    writer.chat = before


def test_calls_come_whole_and_streamed_the_same(server: Running, client: openai.OpenAI, family: str) -> None:
    asked: dict[str, Any] = ASKED | {"logprobs": True}
    with scripted(server, CALLS[family]) as worker:
        whole = client.chat.completions.create(**asked).choices[0]
        chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "weather" in worker.tokenizer.decode(list(worker.requests[0].prompt))
    assert worker.requests[0].sampling.grammar == ""
    assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    first, *_, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", None)
    assert last.finish_reason == "tool_calls"
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.function and part.id] == ["weather"]
    assert "".join(part.function.arguments or "" for part in parts if part.function) == ARGUMENTS
    assert {part.index for part in parts} == {0}
    assert all(chunk.choices[0].delta.content is None for chunk in chunks)
    logprobs = [each for chunk in chunks if (part := chunk.choices[0].logprobs) for each in part.content or ()]
    assert whole.logprobs is not None
    assert logprobs == whole.logprobs.content
    assert len(logprobs) == len(worker.tokenizer.encode(CALLS[family]).ids)


def test_a_call_that_is_cut_ends_with_length_whole_and_streamed(
    server: Running, client: openai.OpenAI, family: str
) -> None:
    with scripted(server, CALLS[family]):
        for size in (10, len(CALLS[family]) - 10):
            asked: dict[str, Any] = HELLO | {"tools": TOOLS, "max_tokens": size}
            whole = client.chat.completions.create(**asked).choices[0]
            *_, last = client.chat.completions.create(**asked, stream=True)
            assert whole.finish_reason == last.choices[0].finish_reason == "length"
    calls = whole.message.tool_calls or ()
    assert len(calls) == (family != "pythonic"), "what is not JSON is read when its arguments have ended"
    for call in calls:
        assert call.type == "function"
        assert ARGUMENTS.startswith(call.function.arguments)


class weather(BaseModel):  # noqa: N801 - the function's name
    city: str


def test_the_openai_clients_own_stream_of_tools(server: Running, client: openai.OpenAI) -> None:
    writer = server.app.repository.get("chat").writer
    assert writer is not None
    before, writer.chat = writer.chat, TEMPLATES["hermes"]
    tools, most = [openai.pydantic_function_tool(weather)], 1000
    with scripted(server, f"Well.\n{CALLS['hermes']}\n{CALLS['hermes']}") as worker:
        with client.chat.completions.stream(**HELLO, tools=tools, max_tokens=most) as stream:
            message = stream.get_final_completion().choices[0].message
        parsed = client.chat.completions.parse(**HELLO, tools=tools, max_tokens=most).choices[0].message
    assert "late_calls" in worker.requests[0].sampling.grammar, "strict functions hold the answer to their schemas"
    for answer in (message, parsed):
        assert answer.content == "Well."
        cities = [call.function.parsed_arguments for call in answer.tool_calls or ()]
        assert cities == [weather(city="Köln")] * 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls or ()]
    again: Any = [*HELLO["messages"], message, *results]
    with scripted(server, "It is sunny.") as worker:
        plain = client.chat.completions.create(model="chat", messages=again, tools=tools)
    assert plain.choices[0].message.content == "It is sunny."
    prompt = worker.tokenizer.decode(list(worker.requests[0].prompt), skip_special_tokens=False)
    assert f"Well.{CALLS['hermes']}{CALLS['hermes']}" in prompt
    assert "<|tool|>sunny" in prompt
    writer.chat = before


NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(("choice", "functions"), [("required", ["weather", "time"]), (NAMED, ["time"])])
def test_a_call_that_must_come_is_held_to_a_grammar(
    server: Running, client: openai.OpenAI, family: str, choice: Any, functions: list[str]
) -> None:
    with scripted(server, CALLS[family].replace("weather", functions[-1]).replace(ARGUMENTS, "{}")) as worker:
        answer = client.chat.completions.create(**ASKED, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls"
    grammar = worker.requests[0].sampling.grammar
    assert [name in grammar for name in ("weather", "time")] == [name in functions for name in ("weather", "time")]
    assert "TEXT" not in grammar


def test_one_call_at_most_ends_the_answer_and_its_tokens(server: Running, client: openai.OpenAI, family: str) -> None:
    with scripted(server, f"{CALLS[family]}, {CALLS[family]}") as worker:
        answer = client.chat.completions.create(**ASKED, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (worker.requests[0].id, 0) in worker.cancelled


def test_no_calls_are_read_where_none_may_be(server: Running, client: openai.OpenAI, family: str) -> None:
    with scripted(server, CALLS[family]) as worker:
        answer = client.chat.completions.create(**ASKED, tool_choice="none").choices[0]
    assert (answer.message.content, answer.finish_reason) == (CALLS[family], "stop")
    assert "weather" not in worker.tokenizer.decode(list(worker.requests[0].prompt))


class Person(BaseModel):
    name: str
    age: int


def test_an_answer_in_json_is_held_to_its_schema(server: Running, client: openai.OpenAI) -> None:
    with scripted(server, '{"name": "Ada", "age": 36}') as worker:
        parsed = client.chat.completions.parse(**HELLO, response_format=Person).choices[0].message.parsed
        client.chat.completions.create(**HELLO, response_format={"type": "json_object"})
        client.chat.completions.create(**HELLO, response_format={"type": "text"})
        cut = client.chat.completions.create(**HELLO, response_format={"type": "json_object"}, max_tokens=5)
    assert parsed == Person(name="Ada", age=36)
    schema, anything, text, _ = [request.sampling.grammar for request in worker.requests]
    assert '"age"' in schema
    assert '"object"' in anything
    assert text == ""
    assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("length", '{"nam')


@pytest.mark.parametrize("number", range(4))
def test_a_schema_that_is_none_is_refused_in_a_sentence_with_the_name_of_the_field(
    server: Running, client: openai.OpenAI, family: str, number: int
) -> None:
    nested: dict[str, Any] = {}
    for _ in range(200):
        nested = {"type": "array", "items": nested}
    wrong: list[Any] = [{"type": 5}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "(("}, nested]
    schema = wrong[number]
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    function = {"name": "a", "parameters": {"properties": {"b": schema}}}
    fields: dict[str, Any] = {
        "response_format": {"response_format": shape},
        "tools": {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
    }
    for parameter, asked in fields.items():
        with scripted(server, "{}"), pytest.raises(openai.BadRequestError, match="does not fit: ") as refused:
            client.chat.completions.create(**HELLO, **asked)
        assert refused.value.param == parameter
        assert ".rs" not in refused.value.message
        assert "\n" not in refused.value.message


def test_several_prompts_have_choices_that_are_counted_through(server: Running, client: openai.OpenAI) -> None:
    def write(prompt: str, choice: int) -> str:
        return f" {prompt[-1]}{choice}"

    with scripted(server, write) as worker:
        encode = worker.tokenizer.encode
        prompts: list[Any] = [["one", "two"], [encode("one").ids, encode("two").ids]]
        for prompt in prompts:
            answer = client.completions.create(model="chat", prompt=prompt, n=2)
            choices = [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]
            assert choices == [(0, " e0", "stop"), (1, " e1", "stop"), (2, " o0", "stop"), (3, " o1", "stop")]
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 16)
        asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        chunks: list[Any] = list(client.completions.create(model="chat", prompt=prompts[0], n=2, **asked))
    *pieces, end = chunks
    assert (end.choices, end.usage) == ([], answer.usage)
    assert all(piece.usage is None for piece in pieces)
    texts = ["", "", "", ""]
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [" e0", " e1", " o0", " o1"]


def test_an_echo_begins_with_the_prompt(server: Running, client: openai.OpenAI) -> None:
    with scripted(server, " upon") as worker:
        tokens = worker.tokenizer.encode("Once").ids
        for prompt in ("Once", tokens):
            for stream in (False, True):
                answer: Any = client.completions.create(model="chat", prompt=prompt, echo=True, n=2, stream=stream)
                texts = ["", ""]
                for part in answer if stream else [answer]:
                    for choice in part.choices:
                        texts[choice.index] += choice.text
                assert texts == ["Once upon"] * 2


def test_more_prompts_than_may_be_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="there are 5000 prompts") as refused:
        client.completions.create(model="chat", prompt=["a"] * 5000)
    assert refused.value.param == "prompt"


def test_the_generate_extension_continues_a_text_whole_and_in_events(server: Running) -> None:
    request = {"text_input": "Once", "parameters": {"max_tokens": 50, "temperature": 0, "stop": ["!"]}, "id": "7"}
    named = {"id": "7", "model_name": "chat", "model_version": "1"}
    with scripted(server, " upon a 😀! time") as worker, server.client() as http:
        for path in ("/v2/models/chat", "/v2/models/chat/versions/1"):
            answer = http.post(f"{path}/generate", json=request)
            assert answer.json() == {**named, "text_output": " upon a 😀", "finish_reason": "stop"}
            with http.stream("POST", f"{path}/generate_stream", json=request) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                events = stream.read().decode().split("\n\n")
            *events, last, end = events
            assert end == ""
            pieces = [json.loads(event.removeprefix("data: ")) for event in events]
            assert "".join(piece["text_output"] for piece in pieces) == " upon a 😀"
            assert all(named.items() <= piece.items() for piece in pieces)
            assert json.loads(last.removeprefix("data: ")) == {**named, "text_output": "", "finish_reason": "stop"}
    assert (worker.requests[0].sampling.max_new_tokens, worker.requests[0].sampling.temperature) == (50, 0)


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"text_input": 5}, 400, "'text_input' must be there"),
        ({"parameters": {"n": 2}}, 400, "unknown parameter 'n'"),
        ({"parameters": {"temperature": 5}}, 400, "'temperature' does not fit"),
        ({"parameters": [1]}, 400, "'parameters' is an object"),
        ({"stream": True}, 400, "must be an object of id, text_input, parameters"),
        ({"text_input": "x" * 300}, 400, "context is 256 tokens"),
    ],
)
@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_what_the_generate_extension_does_not_know_is_refused(
    server: Running, route: str, changes: dict[str, Any], status: int, message: str
) -> None:
    with server.client() as http:
        answer = http.post(f"/v2/models/chat/{route}", json={"text_input": "Once"} | changes)
        assert http.post(f"/v2/models/none/{route}", json={"text_input": "Once"}).status_code == 404
    assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert message in answer.json()["error"]
