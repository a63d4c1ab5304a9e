"""OpenAI's own client against a real engine: answers that are held to grammars, and settings that need all scores."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_models import ANSWERS, COUNT, EMOJI, TEMPLATE, open_chat_model
from pydantic import BaseModel
from served import Running, running

from laconic.tasks.chat_template import ChatTemplate

pytest.importorskip("openvino_genai")
pytest.importorskip("llguidance")

GREEDY: dict[str, Any] = {"model": "chat", "temperature": 0}
CITIES = {"c": {"enum": ["Köln", "漢字"]}}
PARAMETERS = {"type": "object", "properties": CITIES, "required": ["c"], "additionalProperties": False}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "w", "parameters": PARAMETERS}}]
FORMATS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama": '"parameters": ',
    "named": "[ARGS]",
    "fenced": "<\uff5ctool▁sep\uff5c> ```json",
    "pythonic": "[func_name1(",
}
SHORT = "{% if tools %}{% endif %}{# MARK #}" + TEMPLATE
"""A template that reads the functions and writes none, since the model's context is short."""


@pytest.fixture(scope="module")
def server(shared: Path) -> Iterator[Running]:
    with running(open_chat_model(shared)[1], threads=1, kv_cache=1 << 20) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(params=sorted(FORMATS))
def family(request: pytest.FixtureRequest, server: Running) -> Iterator[str]:
    """A family of models, in whose way calls are written."""
    writer = server.app.repository.get("chat").writer
    assert writer is not None
    before, writer.chat = writer.chat, ChatTemplate(SHORT.replace("MARK", FORMATS[request.param]), {})
    yield request.param
    writer.chat = before


def ask(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


class Answer(BaseModel):
    word: str
    number: int


def test_an_answer_matches_its_schema_or_is_cut_and_says_so(client: openai.OpenAI) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {
            "model": "chat",
            "temperature": 0.5,
            "messages": ask(COUNT),
            "seed": seed,
            "max_tokens": 230,
        }
        schema = {
            "type": "object", "additionalProperties": False, "required": ["word", "number"],
            "properties": {"word": {"type": "string", "maxLength": 8}, "number": {"type": "integer", "maximum": 99}},
        }  # fmt: skip
        shape: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        answer = client.chat.completions.create(**asked, response_format=shape).choices[0]
        assert answer.finish_reason == "stop"
        assert Answer.model_validate_json(str(answer.message.content))
        chunks = client.chat.completions.create(**asked, response_format=shape, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    cut = client.chat.completions.create(**asked | {"max_tokens": 4}, response_format=shape).choices[0]
    assert cut.finish_reason == "length"


def test_a_call_that_must_come_comes_with_arguments_of_its_schema(client: openai.OpenAI, family: str) -> None:
    asked: dict[str, Any] = GREEDY | {"messages": ask(COUNT), "tools": TOOLS, "max_tokens": 200}
    whole = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "w"
    assert json.loads(call.function.arguments)["c"] in ("Köln", "漢字")
    chunks = list(
        client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False, stream=True)
    )
    parts = [part.function for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(part.arguments or "" for part in parts if part) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_likeliest_tokens_and_biases_of_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = GREEDY | {"messages": ask(EMOJI)}
    plain = client.chat.completions.create(**asked, logprobs=True, top_logprobs=5)
    assert plain.choices[0].message.content == ANSWERS[EMOJI]
    assert plain.choices[0].logprobs is not None
    content = plain.choices[0].logprobs.content or []
    assert bytes(byte for each in content for byte in each.bytes or ()).decode() == ANSWERS[EMOJI]
    for each in content:
        assert len(each.top_logprobs) == 5
        assert each.top_logprobs[0].bytes == each.bytes, "greedily, the likeliest token is the chosen one"
        assert abs(each.top_logprobs[0].logprob - each.logprob) < 1e-3
    text = client.completions.create(**GREEDY, prompt="<|user|>count<|end|><|assistant|>", logprobs=2, max_tokens=5)
    assert text.choices[0].logprobs is not None
    assert all(len(each) == 2 for each in text.choices[0].logprobs.top_logprobs or ())
    assert text.choices[0].text == "one t"


def test_a_bias_and_a_penalty_change_what_is_written(server: Running, client: openai.OpenAI) -> None:
    writer = server.app.repository.get("chat").writer
    assert writer is not None
    asked: dict[str, Any] = GREEDY | {"messages": ask(COUNT), "max_tokens": 20}
    space = str(writer.tokenizer.encode(" ").ids[0])
    assert " " not in str(client.chat.completions.create(**asked, logit_bias={space: -100}).choices[0].message.content)
    spaces = client.chat.completions.create(**asked, logit_bias={space: 100}).choices[0].message.content
    assert spaces == " " * 20
    plain, penalized = (
        str(client.chat.completions.create(**asked, frequency_penalty=value).choices[0].message.content)
        for value in (0.0, 2.0)
    )
    assert plain == ANSWERS[COUNT][:20]
    assert penalized != plain or len(set(penalized)) >= len(set(plain))


def test_several_prompts_are_written_together(client: openai.OpenAI) -> None:
    prompts = [f"<|user|>{question}<|end|><|assistant|>" for question in ANSWERS]
    answer = client.completions.create(**GREEDY, prompt=prompts, n=2)
    assert [choice.text for choice in answer.choices] == [text for text in ANSWERS.values() for _ in range(2)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(**GREEDY, prompt=prompts, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]


def test_a_template_that_fails_is_told_of_in_a_sentence(server: Running, client: openai.OpenAI) -> None:
    writer = server.app.repository.get("chat").writer
    assert writer is not None
    before = writer.chat
    for text in ("{% for", "{{ messages.nothing.at_all }}", "{{ 1 / 0 }}"):
        writer.chat = ChatTemplate(text, {})
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**GREEDY, messages=ask(COUNT))
        assert refused.value.param == "messages"
        assert "\n" not in refused.value.message
    writer.chat = before
