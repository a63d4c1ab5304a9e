"""What one request may cost the others: bytes, elements of JSON, memory, and what a client is told of it."""

import http.client
import io
import json
import socket
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from artifacts import write_artifact
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from served import Running, change_artifact, request_of, running
from test_serve_http import write_image_model, write_text_model

from laconic.arrays import Arrays
from laconic.errors import InputError, Overloaded
from serve.asgi.body import count_elements, from_json
from serve.http.kserve import print_numbers
from serve.requests.memory_budget import BodyTooLarge, MemoryBudget, Reservation
from serve.settings.server_settings import MIB, Settings

pytestmark = pytest.mark.usefixtures("own_tasks")

LIMITS = Settings(max_json_elements=1000, max_json=MIB)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = [
        write_artifact(folder / "twice.laconic"),
        write_text_model(folder / "text.laconic"),
        write_image_model(folder / "pixels.laconic"),
    ]
    with running(*paths) as server:
        yield server


@pytest.mark.parametrize("path", ["/v2/models/twice/infer", "/v1/models/twice/predict"])
@pytest.mark.parametrize("unit", [b"[],", b"{},", b"1,", b"[[", b'{"":', b'"a",'])
def test_a_body_of_countless_elements_is_refused(server: Running, path: str, unit: bytes) -> None:
    with server.client() as http:
        answer = http.post(path, content=b"[" + unit * (12_000_000 // len(unit)) + b"1]")
    assert answer.status_code == 400
    assert "more than the 500000 elements" in answer.json()["error"]


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=30,
)


def count_nested(value: object) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 1 if inner is None else 10 + sum(map(count_nested, inner))


@given(JSONS)
def test_the_elements_that_are_counted_are_never_fewer_than_there_are(value: object) -> None:
    weight = count_elements(orjson.dumps(value).ljust(200), LIMITS)
    # The last element of each list has no comma behind it: the ten of the list cover it.
    assert weight >= 0.9 * count_nested(value) - 1


def test_json_is_bounded_by_bytes_and_by_elements() -> None:
    assert from_json(b"[" + b"1," * 980 + b"1]", LIMITS) == [1] * 981
    assert from_json(json.dumps(["a" * 900_000]).encode(), LIMITS) == ["a" * 900_000]
    with pytest.raises(InputError, match="1000 elements"):
        from_json(b"[" + b"1," * 1000 + b"1]", LIMITS)
    with pytest.raises(BodyTooLarge, match="Send tensors in binary"):
        from_json(json.dumps(["a" * (MIB + 1)]).encode(), LIMITS)


def test_all_requests_together_hold_no_more_than_the_budget() -> None:
    budget = MemoryBudget(100)
    one, other = Reservation(budget), Reservation(budget)
    one.add(60)
    other.add(40)
    with pytest.raises(Overloaded, match="all of the 100 bytes"):
        other.add(1)
    one.release()
    other.add(60)
    other.release()
    other.release()
    assert budget.used == 0


def test_bodies_beyond_the_budget_get_429_and_what_they_held_is_given_back(tmp_path: Path) -> None:
    with running(write_artifact(tmp_path / "twice.laconic"), max_in_flight=MIB) as server:
        head = f"POST /v2/models/twice/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {MIB}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port)) as held:
            held.sendall(head + bytes(MIB - 100_000))
            time.sleep(0.3)
            with server.client() as http:
                answer = http.post("/v2/models/twice/infer", content=bytes(200_000))
                assert answer.status_code == 429
                assert answer.headers["retry-after"] == "1"
                assert http.post("/v2/models/twice/infer", json=request_of([[1, 2, 3]])).status_code == 200
        with server.client() as http:
            for _ in range(30):
                assert http.post("/v2/models/twice/infer", content=bytes(200_000)).status_code == 400


@pytest.mark.parametrize("path", ["/v2/models/twice/infer", "/v1/models/twice/predict"])
def test_a_413_reaches_a_client_that_sends_everything_before_it_reads(tmp_path: Path, path: str) -> None:
    artifact = write_artifact(tmp_path / "twice.laconic")
    with (
        running(artifact, max_body=MIB) as server,
        closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as client,
    ):
        for body, status in ((bytes(20 * MIB), 413), (b"{}", 400), (bytes(2 * MIB), 413)):
            client.request("POST", path, body)
            answer = client.getresponse()
            assert answer.status == status
            assert (b"1048576" in answer.read()) == (status == 413)


def test_a_client_that_expects_to_be_asked_for_its_body_is_not_asked_in_vain(tmp_path: Path) -> None:
    with running(write_artifact(tmp_path / "twice.laconic"), max_body=MIB) as server:
        head = (
            "POST /v2/models/twice/infer HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9999999\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(head.encode())
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer


def png(size: tuple[int, int]) -> bytes:
    """A PNG of one colour, of any size: a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    width, height = size
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    packer = zlib.compressobj(9)
    data = b"".join([*(packer.compress(bytes(1 + width)) for _ in range(height)), packer.flush()])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(2, 1_000_000), (16, 100_000), (7000, 7000)])
def test_an_image_of_kilobytes_that_would_become_gigabytes_gets_400(server: Running, size: tuple[int, int]) -> None:
    model = server.app.repository.get("pixels")
    model.task.preprocess = model.task.preprocess.model_copy(update={"shortest_edge": 224, "resize": None})
    with server.client() as http:
        answer = http.post("/v1/models/pixels/predict", content=png(size), headers={"content-type": "image/png"})
    assert answer.status_code == 400
    assert "pixels" in answer.json()["error"]


@pytest.mark.parametrize("image", ["é", "日本", "", "data:image/png;base64,é", 3, None, [], {}, [["é"]], True])
def test_what_is_no_image_gets_400(server: Running, image: object) -> None:
    with server.client() as http:
        answer = http.post("/v1/models/pixels/predict", json={"image": image})
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("format", ["PPM", "ICO", "TGA", "PCX", "EPS"])
def test_formats_beyond_the_list_get_400(server: Running, format: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, format)
    with server.client() as http:
        answer = http.post("/v1/models/pixels/predict", files={"image": ("x", file.getvalue())})
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("x", [[1e39, 0, 0], [True, False, True], ["1", "2", "3"], [None] * 3, [1, 2, [3]], 1e400])
def test_numbers_that_the_input_does_not_hold_get_400(server: Running, x: object) -> None:
    with server.client() as http:
        body = json.dumps({"inputs": {"x": x}}).replace("Infinity", "1e400")
        answer = http.post("/v1/models/twice/predict", content=body)
    assert answer.status_code == 400, answer.text


def test_text_among_numbers_gets_400_and_takes_no_memory(server: Running) -> None:
    data = [1.0] * 100_000 + ["a" * 1_000_000]
    with server.client() as http:
        tensor = {"name": "x", "datatype": "FP32", "shape": [33367, 3], "data": data}
        for path, body in (
            ("/v2/models/twice/infer", {"inputs": [tensor]}),
            ("/v1/models/twice/predict", {"inputs": {"x": [[data]]}}),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert "it holds text" in answer.json()["error"]


@pytest.mark.parametrize("token", [-1, 10**6, 2**62])
def test_a_token_that_the_vocabulary_does_not_have_gets_400_and_reaches_no_engine(server: Running, token: int) -> None:
    before = len(server.batches("text"))
    with server.client() as http:
        answer = http.post("/v2/models/text/infer", json=request_of([[2, token, 3]], "input_ids", "INT64"))
    assert answer.status_code == 400
    assert "input 'input_ids' runs from" in answer.json()["error"]
    assert len(server.batches("text")) == before


@pytest.mark.parametrize(
    "path", ["/v2/models/twice/infer", "/v2/models/twice/versions/1/infer", "/v1/models/twice/predict"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_another_method_gets_405_and_is_told_the_right_one(server: Running, path: str, method: str) -> None:
    with server.client() as http:
        answer = http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["/v2/health/live", "/v2/health/ready", "/v2/models/twice/ready", "/v2", "/metrics", "/"]
)
def test_what_can_be_got_can_be_headed(server: Running, path: str) -> None:
    with server.client() as http:
        answer = http.head(path)
        assert answer.status_code == 200
        assert answer.content == b""
        assert http.get(path).status_code == 200


@pytest.mark.parametrize("value", ["soon", "-1", "0", "1e3", "nan", "", "9" * 40])
def test_a_deadline_that_is_no_time_gets_400(server: Running, value: str) -> None:
    with server.client() as http:
        answer = http.post("/v1/models/twice/predict", json={"inputs": [[1, 2, 3]]}, headers={"Request-Timeout": value})
    assert answer.status_code == 400
    assert "Request-Timeout" in answer.json()["error"]


@pytest.mark.parametrize(("options", "headers"), [({"deadline": 0.05}, {}), ({}, {"Request-Timeout": "0.05"})])
def test_a_request_that_waits_beyond_its_deadline_gets_504(
    tmp_path: Path, options: dict[str, float], headers: dict[str, str]
) -> None:
    path = change_artifact(write_artifact(tmp_path / "slow.laconic", seconds=1.0), knee=1)
    with running(path, threads=1, queue_seconds=60, **options) as server, ThreadPoolExecutor(2) as pool:
        url = f"{server.url}/v1/models/slow/predict"
        posts = [
            pool.submit(httpx.post, url, json={"inputs": [[1, 2, 3]]}, timeout=20, headers=headers) for _ in range(2)
        ]
        answers = sorted((post.result() for post in posts), key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in answers] == [200, 504]
    assert "waited in the queue" in answers[1].json()["error"]


def test_a_batch_that_is_too_large_for_the_memory_is_run_in_pieces(tmp_path: Path) -> None:
    path = change_artifact(write_artifact(tmp_path / "twice.laconic"), knee=64)
    with running(path, threads=1) as server, server.client() as http:
        (session,) = server.app.repository.get("twice").backend.sessions
        run = session.run

        def run_few(inputs: Arrays) -> Arrays:
            if len(inputs["x"]) > 5:
                raise RuntimeError("Failed to allocate memory for requested buffer of size 1000000")
            return run(inputs)

        session.run = run_few  # type: ignore[method-assign]
        rows = np.arange(120, dtype=np.float32).reshape(40, 3)
        answer = http.post("/v2/models/twice/infer", json=request_of(rows))
        assert answer.json()["outputs"][0]["data"] == (2 * rows).ravel().tolist()
        answer = http.post("/v1/models/twice/predict", json={"inputs": rows.tolist()})
        assert answer.json()["answers"] == [{"y": row} for row in (2 * rows).tolist()]

        def run_none(inputs: Arrays) -> Arrays:
            raise MemoryError

        session.run = run_none  # type: ignore[method-assign]
        answer = http.post("/v2/models/twice/infer", json=request_of(rows))
        assert answer.status_code == 503
        assert "too little memory" in answer.json()["error"]


def test_a_failing_engine_is_asked_no_more_often_than_halving_takes(tmp_path: Path) -> None:
    path = change_artifact(write_artifact(tmp_path / "twice.laconic", poison=666.0), knee=64)
    with running(path, threads=1) as server, server.client() as http:
        rows = np.ones((60, 3), np.float32)
        rows[17] = 666
        answer = http.post("/v1/models/twice/predict", json={"inputs": rows.tolist()})
        assert answer.status_code == 500
        assert "twice" not in answer.json()["error"]
        assert "poison" not in answer.json()["error"]
        assert len(server.batches("twice")) <= 2 * 7 * 4


def test_large_answers_are_printed_as_small_ones_are(server: Running) -> None:
    array = np.random.default_rng(0).standard_normal(100_001).astype(np.float32)
    assert orjson.dumps(print_numbers(array)) == orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    rows = np.random.default_rng(0).standard_normal((4000, 3)).astype(np.float32)
    with server.client() as http:
        answer = http.post("/v2/models/twice/infer", json=request_of(rows)).json()["outputs"][0]["data"]
        assert np.array_equal(np.float32(answer), (2 * rows).ravel())
        answer = http.post("/v1/models/twice/predict", json={"inputs": rows.tolist()}).json()["answers"]
        assert np.array_equal(np.float32([each["y"] for each in answer]), 2 * rows)
