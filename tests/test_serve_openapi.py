"""The OpenAPI description: it fits each model, and requests made from it get no 5xx and no undocumented answer."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from artifacts import write_artifact
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import Running, running, write_sequences
from test_serve_http import write_image_model
from test_serve_openai import write_model

pytestmark = pytest.mark.usefixtures("own_tasks")

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(own_tasks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = [
        write_artifact(folder / "twice.laconic"),
        write_model(folder / "text.laconic"),
        write_image_model(folder / "pixels.laconic"),
        write_sequences(folder / "sequences.laconic", task="padded"),
    ]
    with running(*paths, queue_seconds=60) as server:
        yield server


@pytest.fixture(scope="module")
def described(server: Running) -> dict[str, Any]:
    with server.client() as client:
        return client.get("/openapi.json").json()


def body_of(described: dict[str, Any], path: str, kind: str = "application/json") -> dict[str, Any]:
    return described["paths"][path]["post"]["requestBody"]["content"][kind]["schema"]


def try_requests(url: str, mode: GenerationMode, count: int, paths: str = "") -> Counter[int]:
    """Ask for every operation `count` times, and check the answers. Returns how many had each status. paths: what those
    that are asked end with."""
    statuses: Counter[int] = Counter()
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = result.ok()
        if not operation.path.endswith(paths):
            continue

        @settings(max_examples=count, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            case.headers.pop("Request-Timeout", None)  # a short one is answered with 504, as it should be
            answer = case.call()
            case.validate_response(answer, checks=CHECKS)
            statuses[answer.status_code] += 1

        if mode is GenerationMode.POSITIVE or operation.body:
            check()
    return statuses


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_requests_made_from_the_description_get_documented_answers(server: Running, mode: GenerationMode) -> None:
    statuses = try_requests(server.url, mode, 2)
    assert max(statuses) < 500
    assert statuses[200] or mode is GenerationMode.NEGATIVE


def test_the_description_has_the_routes_and_inputs_of_each_model(described: dict[str, Any], server: Running) -> None:
    for model in server.app.repository:
        for path in ("v2/models/{}/infer", "v2/models/{}/versions/1/infer", "v1/models/{}/predict"):
            assert "post" in described["paths"][f"/{path.format(model.name)}"]
    names = described["paths"]["/v2/models/{name}"]["get"]["parameters"][0]["schema"]["enum"]
    assert names == ["pixels", "sequences", "text", "twice"]
    assert body_of(described, "/v1/embeddings")["properties"]["model"]["enum"] == ["text"]
    inputs = body_of(described, "/v2/models/text/infer")["properties"]["inputs"]
    assert (inputs["minItems"], inputs["maxItems"]) == (2, 2)
    ids = inputs["items"]["anyOf"][0]["properties"]
    assert ids["name"]["enum"] == ["input_ids"]
    assert ids["datatype"]["enum"] == ["INT64"]
    assert ids["shape"]["description"] == "[batch, seq: 1 to 16]"
    assert ids["data"]["anyOf"][0]["items"]["type"] == "integer"
    assert "image/*" in described["paths"]["/v1/models/pixels/predict"]["post"]["requestBody"]["content"]


@pytest.mark.parametrize(
    ("model", "good", "bad"),
    [
        ("text", {"text": "a"}, {"text": 1}),
        ("text", {"text": [["one", "two"], "three"]}, {"text": [["one", "two", "three"]]}),
        ("text", {"text": ["one"]}, {"text": []}),
        ("twice", {"inputs": {"x": [1, 2, 3]}}, {"inputs": {"x": [1, 2]}}),
        ("twice", {"inputs": [{"x": [1, 2, 3.5]}]}, {"inputs": {"x": [1, 2, 1e39]}}),
        ("twice", {"inputs": {"x": [1, 2, 3]}}, {"inputs": {"y": [1, 2, 3]}}),
        ("sequences", {"inputs": {"x": [1] * 64}}, {"inputs": {"x": [1] * 65}}),
    ],
)
def test_samples_fit_the_schema_where_the_model_takes_them(
    server: Running, described: dict[str, Any], model: str, good: Any, bad: Any
) -> None:
    path = f"/v1/models/{model}/predict"
    schema = jsonschema_rs.validator_for(body_of(described, path))
    with server.client() as client:
        assert schema.is_valid(good)
        assert client.post(path, json=good).status_code == 200
        assert not schema.is_valid(bad)
        assert client.post(path, json=bad).status_code == 400


def test_each_example_is_accepted(server: Running, described: dict[str, Any]) -> None:
    tried = 0
    with server.client() as client:
        for path, operations in described["paths"].items():
            for kind, content in operations.get("post", {}).get("requestBody", {}).get("content", {}).items():
                if "example" in content["schema"] and "..." not in str(content["schema"]["example"]):
                    answer = client.post(path, json=content["schema"]["example"], headers={"content-type": kind})
                    assert answer.status_code == 200, answer.text
                    assert jsonschema_rs.validator_for(content["schema"]).is_valid(content["schema"]["example"])
                    tried += 1
    assert tried >= 10
