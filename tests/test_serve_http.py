"""The control plane, the task endpoint, metrics and errors."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from artifacts import FAILED, write_artifact
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from served import Running, request_of, running, write_image_model, write_sequences, write_text_model

from laconic.errors import CorruptArtifact, UnprovenArtifact, UsageError
from serve.http.app import create_app

pytestmark = pytest.mark.usefixtures("own_tasks")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = [
        write_artifact(folder / "twice.laconic"),
        write_sequences(folder / "sequences.laconic"),
        write_text_model(folder / "text.laconic"),
    ]
    with running(*paths, max_body=1 << 20) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/nothing", 404),
        ("GET", "/v2/models/twice/versions/2", 404),
        ("GET", "/v2/models/twice/versions/2/ready", 404),
        ("POST", "/v2/models/nothing/infer", 404),
        ("POST", "/v2/models/twice/versions/2/infer", 404),
        ("POST", "/v1/models/nothing/predict", 404),
        ("GET", "/v2/models/twice/infer", 405),
        ("GET", "/v1/models/twice/predict", 405),
        ("DELETE", "/v2", 405),
        ("POST", "/v2/repository/models/twice/load", 400),
    ],
)
def test_every_error_is_told_as_v2_clients_read_it(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]


def test_a_misspelt_model_is_met_with_the_right_name(http: httpx.Client) -> None:
    assert "Did you mean 'twice'?" in http.get("/v2/models/twic").json()["error"]


def test_texts_and_arrays_are_answered_one_by_one_or_in_lists_without_a_content_type_too(http: httpx.Client) -> None:
    one = http.post("/v1/models/text/predict", json={"text": "the cat"}).json()
    assert one == {"model": "text", "answers": [{"embedding": [4, 6]}]}
    many = http.post("/v1/models/text/predict", json={"text": ["the cat", "sat", "the cat"]}).json()
    assert many["answers"] == [{"embedding": [4, 6]}, {"embedding": [8]}, {"embedding": [4, 6]}]
    answer = http.post(
        "/v1/models/text/predict",
        content=b'{"text": "the cat"}',
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert answer.status_code == 200
    assert http.post("/v1/models/twice/predict", json={"inputs": {"x": [1, 2, 3]}}).json()["answers"] == [
        {"y": [2, 4, 6]}
    ]
    samples = [{"x": [1, 2]}, {"x": [1, 2, 3]}]
    assert http.post("/v1/models/sequences/predict", json={"inputs": samples}).json()["answers"] == [
        {"y": [2, 4]},
        {"y": [2, 4, 6]},
    ]


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        ("text", {"txt": "the cat"}, "takes an object"),
        ("text", ["the cat"], "takes an object"),
        ("text", {"text": []}, "empty list"),
        ("text", {"text": ["the cat", 3]}, "sample 1"),
        ("text", {"text": None}, "sample 0"),
        ("twice", {"inputs": {"x": [1, 2]}}, "expected"),
        ("twice", {"inputs": {"x": ["a", "b", "c"]}}, "not an array"),
        ("twice", {"inputs": {"z": [1, 2, 3]}}, "missing"),
    ],
)
def test_a_sample_that_does_not_fit_gets_400_and_says_which(
    http: httpx.Client, model: str, body: object, message: str
) -> None:
    answer = http.post(f"/v1/models/{model}/predict", json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{{{", b'{"text": NaN}', b"[" * 1_000_000])
def test_a_body_that_is_not_json_gets_400(http: httpx.Client, body: bytes) -> None:
    assert http.post("/v1/models/text/predict", content=body).status_code == 400
    assert http.post("/v1/models/text/predict", json={"text": "the cat"}).status_code == 200


@pytest.mark.filterwarnings("ignore:overflow")
def test_an_answer_that_json_cannot_hold_gets_400_as_over_v2(http: httpx.Client) -> None:
    answer = http.post("/v1/models/twice/predict", json={"inputs": {"x": [3e38, 0, 0]}})
    assert answer.status_code == 400
    assert "NaN or infinity" in answer.json()["error"]


def test_an_image_is_taken_as_a_form_as_a_body_and_in_base64(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (9, 7), (255, 0, 0)).save(file, "PNG")
    png = file.getvalue()
    text = base64.b64encode(png).decode()
    with running(write_image_model(tmp_path / "pixels.laconic")) as server, server.client() as http:
        path = "/v1/models/pixels/predict"
        answers = [
            http.post(path, files={"image": ("red.png", png, "image/png")}),
            http.post(path, content=png, headers={"content-type": "image/png"}),
            http.post(path, json={"image": text}),
            http.post(path, json={"image": [f"data:image/png;base64,{text}"]}),
        ]
        assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
        assert all(answer.json() == {"model": "pixels", "answers": [1.0]} for answer in answers)
        twice = http.post(path, files=[("image", ("a.png", png)), ("image", ("b.png", png))])
        assert len(twice.json()["answers"]) == 2
        for bad in (
            http.post(path, files={"image": ("red.png", b"no image")}),
            http.post(path, files={"picture": ("red.png", png)}),
            http.post(path, content=b"rubbish", headers={"content-type": "multipart/form-data; boundary=x"}),
            http.post(path, content=b"rubbish", headers={"content-type": "multipart/form-data"}),
            http.post(path, json={"image": "%%%"}),
        ):
            assert bad.status_code == 400, bad.text


def test_metrics_bear_tritons_names_and_count(tmp_path: Path) -> None:
    with running(write_artifact(tmp_path / "twice.laconic")) as server, server.client() as http:
        http.post("/v2/models/twice/infer", json=request_of([[1, 2, 3]] * 4))
        http.post("/v1/models/twice/predict", json={"inputs": [[1, 2, 3]] * 2})
        http.post("/v2/models/twice/infer", json=request_of([[1, 2]]))
        text = http.get("/metrics").text
        statistics = http.get("/v2/models/twice/stats").json()["model_stats"][0]
    families = list(text_string_to_metric_families(text))
    samples = {
        sample.name.removesuffix("_total"): sample.value  # which the parser appends to the names of counters
        for family in families
        for sample in family.samples
        if sample.labels.get("model") == "twice" and sample.labels.get("reason", "OTHER") == "OTHER"
    }
    assert samples["nv_inference_request_success"] == 2
    assert samples["nv_inference_request_failure"] == 1
    assert samples["nv_inference_count"] == 6
    assert 2 <= samples["nv_inference_exec_count"] <= 3
    assert samples["nv_inference_pending_request_count"] == 0
    assert samples["nv_inference_request_duration_us"] >= samples["nv_inference_compute_infer_duration_us"] > 0
    assert samples["nv_inference_queue_duration_us"] > 0
    assert "process_resident_memory_bytes" in text
    assert all(family.type in ("counter", "gauge", "histogram") and family.documentation for family in families)
    histograms = {family.name: family.samples for family in families if family.type == "histogram"}
    assert len(histograms) == 6
    for name, rows in histograms.items():
        buckets = [row.value for row in rows if row.name == f"{name}_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == samples[f"{name}_count"]
        assert rows[len(buckets) - 1].labels["le"] == "+Inf"
    assert samples["laconic_request_duration_seconds_count"] == samples["laconic_write_duration_seconds_count"] == 2
    assert samples["laconic_batch_rows_sum"] == 6
    assert statistics["inference_count"] == 6
    assert statistics["inference_stats"]["success"]["count"] == 2


def test_what_is_unproven_or_damaged_or_of_one_name_or_nothing_is_refused_before_anything_is_served(
    tmp_path: Path,
) -> None:
    path = write_artifact(tmp_path / "unproven.laconic", verdict=FAILED)
    with pytest.raises(UnprovenArtifact, match="--unproven"):
        create_app([path])
    with running(path, unproven=True) as server, server.client() as http:
        assert http.get("/v2/models/unproven/ready").status_code == 200
    good, bad = write_artifact(tmp_path / "good.laconic"), write_artifact(tmp_path / "bad.laconic")
    (bad / "model.onnx").write_text("changed")
    with pytest.raises(CorruptArtifact, match=r"bad\.laconic"):
        create_app([good, bad])
    paths = [write_artifact(tmp_path / folder / "same.laconic") for folder in ("a", "b")]
    with pytest.raises(UsageError, match="both be served as 'same'"):
        create_app(paths)
    with pytest.raises(UsageError, match="nothing to serve"):
        create_app([])
