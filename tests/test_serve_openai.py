"""OpenAI's embeddings API, asked by its own client, and what it is told of what does not fit."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from artifacts import embedding_task, write_artifact
from served import Running, change_artifact, running

TEXTS = ["the cat sat on a mat", "red birds"]
TOKENS = [[2, 3, 4, 5, 6, 7], [11, 14]]


def write_model(path: Path, **model: Any) -> Path:
    """An "embedding" of a text: twice its token ids."""
    task = embedding_task()
    write_artifact(path, assets=task.assets(), input="input_ids", **model)
    ids = np.array([[2, 3, 4]], np.int64)
    inputs = [spec.model_dump(mode="json") for spec in task.inputs]
    golden = {"0.input.input_ids": ids, "0.input.attention_mask": np.ones_like(ids), "0.output.y": 2 * ids}
    return change_artifact(path, task=task.name, inputs=inputs, outputs=[inputs[0] | {"name": "y"}], golden=golden)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, own_tasks: None) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    ranked = change_artifact(write_model(folder / "ranked.laconic"), task="ranked")
    with running(write_model(folder / "text.laconic"), write_artifact(folder / "twice.laconic"), ranked) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("encoding", ["float", "base64", None])
@pytest.mark.parametrize("given", [TEXTS, TOKENS], ids=["texts", "tokens"])
def test_the_client_gets_a_vector_for_each_text_or_list_of_tokens(
    client: openai.OpenAI, given: Any, encoding: Any
) -> None:
    answer = client.embeddings.create(
        model="text", input=given, encoding_format=encoding or openai.NOT_GIVEN, user="somebody"
    )
    vectors = [each.embedding for each in answer.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors]
    assert vectors == [[2 * each for each in tokens] for tokens in TOKENS]
    assert [each.index for each in answer.data] == [0, 1]
    assert answer.model == "text"
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (8, 8)


def test_the_client_lists_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["text", "twice", "ranked"]
    model = client.models.retrieve("twice")
    assert (model.id, model.object, model.owned_by) == ("twice", "model", "laconic")
    assert model.created > 1_700_000_000
    with pytest.raises(openai.NotFoundError, match="no model 'thrice'"):
        client.models.retrieve("thrice")


@pytest.mark.parametrize(
    ("request_", "parameter", "message"),
    [
        ({"input": TEXTS, "model": "twice"}, "model", "does tensors, and no embeddings"),
        ({"input": TEXTS, "model": 5}, "model", "must be a model's name"),
        ({"input": TEXTS}, "model", "must be a model's name"),
        ({"input": TEXTS, "model": "text", "dimensions": 4}, "dimensions", "was not trained to give 4"),
        ({"input": TEXTS, "model": "text", "dimensions": 1.5}, "dimensions", "not a whole number"),
        ({"input": TEXTS, "model": "text", "encoding_format": "int8"}, "encoding_format", "not float or base64"),
        ({"input": TEXTS, "model": "text", "truncate": "end"}, "truncate", "unknown parameter"),
        ({"model": "text"}, "input", "must be a text"),
        ({"input": [], "model": "text"}, "input", "must be a text"),
        ({"input": [[]], "model": "text"}, "input", "must be a text"),
        ({"input": ["one", [2]], "model": "text"}, "input", "must be a text"),
        ({"input": [True], "model": "text"}, "input", "must be a text"),
        ({"input": [1.5], "model": "text"}, "input", "must be a text"),
        ({"input": [["one", "two"]], "model": "text"}, "input", "must be a text"),
        ({"input": [-1], "model": "text"}, "input", "run from -1 to -1, and the model takes 0 to"),
        ({"input": [[2, 10**6]], "model": "text"}, "input", "run from 2 to 1000000"),
        ({"input": [2] * 17, "model": "text"}, "input", "17 tokens, and the model takes 1 to 16"),
        ([], None, "must be an object"),
    ],
)
def test_a_request_that_does_not_fit_is_told_so_in_openais_shape(
    server: Running, request_: Any, parameter: str | None, message: str
) -> None:
    with server.client() as http:
        answer = http.post("/v1/embeddings", json=request_)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", parameter, None)


def test_errors_become_the_clients_exceptions(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as failed:
        client.embeddings.create(model="thrice", input="a")
    assert failed.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="text", input="a", dimensions=3)
    assert refused.value.param == "dimensions"
    with server.client() as http:
        assert http.post("/v1/embeddings", content=b"{").json()["error"]["type"] == "invalid_request_error"
        answer = http.get("/v1/embeddings")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


DOCUMENTS = ["cat", "red birds", "the cat sat on a mat"]


def test_documents_are_ranked_best_first(server: Running) -> None:
    request = {"model": "ranked", "query": "Where?", "documents": DOCUMENTS, "return_documents": True}
    with server.client() as http:
        answer = http.post("/v1/rerank", json=request).json()
        best = http.post("/v1/rerank", json=request | {"top_n": 1, "return_documents": False}).json()
        objects = [{"text": text} for text in DOCUMENTS]
        same = http.post("/v1/rerank", json=request | {"documents": objects}).json()
        described = http.get("/openapi.json").json()["paths"]["/v1/rerank"]["post"]["requestBody"]["content"]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 3
    assert [result["document"]["text"] for result in answer["results"]] == [
        DOCUMENTS[result["index"]] for result in answer["results"]
    ]
    assert sorted(result["index"] for result in answer["results"]) == [0, 1, 2]
    assert (answer["model"], answer["object"]) == ("ranked", "list")
    assert answer["usage"]["total_tokens"] > 0
    first = answer["results"][0]
    assert best["results"] == [{"index": first["index"], "relevance_score": first["relevance_score"]}]
    assert same["results"] == answer["results"]
    assert described["application/json"]["schema"]["properties"]["model"]["enum"] == ["ranked"]


@pytest.mark.parametrize(
    ("changes", "parameter", "message"),
    [
        ({"model": "text"}, "model", "ranks no documents"),
        ({"documents": []}, "documents", "at least 1"),
        ({"documents": [5]}, "documents", "does not fit"),
        ({"query": None}, "query", "valid string"),
        ({"top_n": 0}, "top_n", "greater than or equal to 1"),
        ({"max_chunks_per_doc": 5}, "max_chunks_per_doc", "unknown parameter"),
    ],
)
def test_a_ranking_that_does_not_fit_is_refused_with_the_name_of_the_field(
    server: Running, changes: dict[str, Any], parameter: str, message: str
) -> None:
    with server.client() as http:
        answer = http.post("/v1/rerank", json={"model": "ranked", "query": "a", "documents": DOCUMENTS} | changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == parameter
    assert message in answer.json()["error"]["message"]


def test_an_overloaded_server_answers_429_until_there_is_room(tmp_path: Path) -> None:
    path = change_artifact(write_model(tmp_path / "slow.laconic", seconds=0.3), knee=1)
    with running(path, threads=1, queue_seconds=0.1) as server:
        limits = {"base_url": f"{server.url}/v1", "api_key": "none"}

        async def flood() -> list[Any]:
            async with openai.AsyncOpenAI(**limits, max_retries=0) as client:
                await client.embeddings.create(model="slow", input="the cat")  # from which the rate is known
                asked = (client.embeddings.create(model="slow", input="the cat") for _ in range(8))
                return await asyncio.gather(*asked, return_exceptions=True)

        answers = asyncio.run(flood())
        refused = [each for each in answers if isinstance(each, openai.RateLimitError)]
        assert refused
        assert len(refused) < len(answers)
        for each in refused:
            assert int(each.response.headers["retry-after"]) >= 1
            assert each.code == "rate_limit_exceeded"
        with openai.OpenAI(**limits, max_retries=5) as patient:
            assert patient.embeddings.create(model="slow", input="the cat").data[0].embedding == [4, 6]
