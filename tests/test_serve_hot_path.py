"""Short cuts on the way of a small request: the event loop runs tiny models, known JSON is not read again, an answer is
written at once. None may be told from the long way."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_artifact
from hypothesis import given
from hypothesis import strategies as st
from served import Running, running, write_sequences

from laconic.artifacts.manifest import MEASURED
from laconic.hashing import seal, unseal
from laconic.tensor import TensorSpec
from laconic.timing.measurements import Timing
from serve.http import kserve
from serve.http.request_cache import LONGEST, MOST, RequestCache
from serve.protocol.infer_request import DTYPES, InferRequest
from serve.settings.server_settings import Settings

pytestmark = pytest.mark.usefixtures("own_tasks")

OUTPUT = (TensorSpec(name="y", dtype="float32", shape=("batch", 3)),)


def write_timed(path: Path, latency: float, **model: float) -> Path:
    """An artifact of which a run took so many seconds when it was made."""
    write_artifact(path, **model)
    timing = Timing(
        engine="fake, float32",
        batch=1,
        length=0,
        threads=1,
        seconds=latency,
        quartiles=(latency, latency),
        speedup=1,
        speedup_quartiles=(1, 1),
    )
    (path / MEASURED).write_bytes(seal(unseal(path / MEASURED) | {"timings": [timing.model_dump()]}))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = [
        write_timed(folder / "tiny.laconic", 1e-6, poison=666.0),
        write_timed(folder / "slower.laconic", 1e-6, seconds=0.001),
        write_timed(folder / "untold.laconic", 1.0),
        write_sequences(folder / "sequences.laconic"),
    ]
    with running(*paths) as server:
        yield server


def binary_request(rows: np.ndarray, **content: object) -> tuple[bytes, bytes]:
    """The JSON and the tensors of a request for binary answers."""
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": rows.shape,
        "parameters": {"binary_data_size": rows.nbytes},
    }
    head = {"inputs": [tensor], "parameters": {"binary_data_output": True}, **content}
    return json.dumps(head).encode(), rows.tobytes()


def post(server: Running, name: str, rows: np.ndarray, **content: object) -> tuple[int, dict, bytes]:
    head, tensors = binary_request(np.asarray(rows, np.float32), **content)
    with server.client() as http:
        answer = http.post(
            f"/v2/models/{name}/infer",
            content=head + tensors,
            headers={"inference-header-content-length": str(len(head))},
        )
    length = int(answer.headers.get("inference-header-content-length", len(answer.content)))
    return answer.status_code, json.loads(answer.content[:length]), answer.content[length:]


def test_only_a_model_that_runs_faster_than_a_thread_wakes_runs_on_the_event_loop(server: Running) -> None:
    inline = {model.name: model.batcher.inline is not None for model in server.app.repository}
    assert inline == {"tiny": True, "slower": False, "untold": False, "sequences": False}
    assert server.app.repository.get("tiny").batcher.executors == []


@pytest.mark.parametrize("name", ["tiny", "slower"])
def test_a_repeated_request_gets_the_answer_of_its_own_tensors(server: Running, name: str) -> None:
    for turn in range(4):
        for rows in (1, 2, 9):
            x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + turn
            status, head, tensors = post(server, name, x, id=f"r{rows}")
            assert status == 200
            assert head["id"] == f"r{rows}"
            assert head["outputs"][0]["shape"] == [rows, 3]
            assert tensors == (2 * x).tobytes()


def test_on_the_event_loop_too_rows_are_counted_and_a_failure_fails_only_its_own_request(server: Running) -> None:
    good, bad = np.ones((1, 3)), np.full((1, 3), 666.0)
    assert [post(server, "tiny", x)[0] for x in (good, bad, good)] == [200, 500, 200]
    statistics = server.app.repository.get("tiny").statistics
    before = statistics.rows
    for _ in range(3):
        post(server, "tiny", np.ones((2, 3)))
    assert statistics.rows - before == 6


def test_a_known_request_of_another_size_is_refused_as_ever(server: Running) -> None:
    head, tensors = binary_request(np.ones((1, 3), np.float32))
    with server.client() as http:
        for body, status in ((tensors, 200), (tensors[:-4], 400), (tensors + b"1234", 400), (tensors, 200)):
            headers = {"inference-header-content-length": str(len(head))}
            assert http.post("/v2/models/tiny/infer", content=head + body, headers=headers).status_code == status


def read(head: bytes, tensors: bytes) -> InferRequest:
    return kserve.read_request(head + tensors, len(head), OUTPUT, Settings())


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(["FP32", "FP64", "INT64", "UINT8", "FP16"]))
def test_what_is_read_of_a_known_request_is_what_the_long_way_reads(rows: int, columns: int, datatype: str) -> None:
    x = np.arange(rows * columns).reshape(rows, columns).astype(DTYPES[datatype])
    tensors = [
        {"name": name, "datatype": datatype, "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
        for name in ("a", "b")
    ]
    head = json.dumps({"id": "7", "inputs": tensors, "parameters": {"timeout": 5_000_000}}).encode()
    cache = RequestCache()
    cache.add(head, 2 * x.nbytes, read(head, x.tobytes() + x.tobytes()))
    known = cache.get(head, 2 * x.nbytes)
    assert known is not None
    body = x.tobytes() + (x + 1).tobytes()
    ours, long = known.read(head + body, len(head)), read(head, body)
    assert (ours.id, ours.outputs, ours.timeout) == (long.id, long.outputs, long.timeout)
    assert known.rows == rows
    for name in ("a", "b"):
        assert np.array_equal(ours.inputs[name], long.inputs[name])
        assert ours.inputs[name].dtype == long.inputs[name].dtype


def test_neither_tensors_in_json_nor_long_json_are_remembered_and_never_more_than_some() -> None:
    cache = RequestCache()
    x = np.ones((1, 3), np.float32)
    in_json = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}).encode()
    assert cache.add(in_json, 0, read(in_json, b"")) is None
    head, tensors = binary_request(x, id="x" * LONGEST)
    assert cache.add(head, x.nbytes, read(head, tensors)) is None
    heads = [binary_request(x, id=str(number))[0] for number in range(MOST + 2)]
    for head in heads:
        assert cache.add(head, x.nbytes, read(head, tensors)) is not None
    assert [cache.get(head, x.nbytes) is None for head in heads] == [True, True] + [False] * MOST


def test_what_is_remembered_of_an_answer_is_never_half_of_one_and_half_of_another() -> None:
    """Answers are written in threads: here one is, at the moment in which another is being remembered."""
    head, tensors = binary_request(
        np.ones((1, 3), np.float32), outputs=[{"name": "y", "parameters": {"binary_data": True}}]
    )
    request = read(head, tensors)
    known = RequestCache().add(head, len(tensors), request)
    assert known is not None
    written: list[bytes] = []

    class Seen(np.ndarray):
        """An array whose shape is looked up in the middle of that moment."""

        @property
        def shape(self) -> tuple[int, ...]:  # type: ignore[override]
            answer = known.write({"y": one})
            written.append(b"" if answer is None else answer.body)
            return np.ndarray.shape.__get__(self)  # type: ignore[attr-defined]

    one, two = (np.ones((rows, 3), np.float32) for rows in (1, 2))
    for outputs in ({"y": one}, {"y": two.view(Seen)}):
        plain = {name: np.asarray(array) for name, array in outputs.items()}
        known.remember_answer(kserve.write_answer(request, plain, model="m", version="1"), outputs)
    expected = kserve.write_answer(request, {"y": one}, model="m", version="1").body
    assert written
    assert set(written) <= {b"", expected}


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2", "/nothing"])
def test_an_answer_is_one_packet_whoever_writes_it(server: Running, path: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        for _ in range(2):
            client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            answer = client.recv(1 << 16)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) == len(body)


def test_requests_that_are_sent_at_once_are_answered_in_their_order(server: Running) -> None:
    requests = []
    for number in range(8):
        head, tensors = binary_request(np.full((1, 3), number, np.float32), id=str(number))
        length = len(head) + len(tensors)
        requests.append(
            f"POST /v2/models/{'tiny' if number % 2 else 'slower'}/infer HTTP/1.1\r\nhost: x\r\n"
            f"inference-header-content-length: {len(head)}\r\ncontent-length: {length}\r\n\r\n".encode()
            + head
            + tensors
        )
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(b"".join(requests) + b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answers = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answers.count(b"HTTP/1.1 200") == 9
    ids = [answers.index(f'"id":"{number}"'.encode()) for number in range(8)]
    assert ids == sorted(ids)
