"""The fields of requests for text over HTTP, with an engine that writes what the test says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_models import open_chat_model
from scripted_worker import scripted
from served import Running, running

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
    assert whole.tokens == ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80"]
    assert whole.top_logprobs == [{"!": -0.5, '"': -1.5, token: -0.25} for token in whole.tokens]
    streamed = [each for chunk in chunks if (part := chunk.choices[0].logprobs) for each in part.top_logprobs or ()]
    assert streamed == whole.top_logprobs
    assert alone is not None
    assert (alone.tokens, alone.top_logprobs) == (whole.tokens, None)
