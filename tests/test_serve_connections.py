"""Clients that are slow, silent or many."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from artifacts import write_artifact
from served import Running, change_artifact, eventually, request_of, running
from test_serve_process import process

from serve.settings.server_settings import MIB

pytestmark = pytest.mark.usefixtures("own_tasks")

INFER = "/v2/models/twice/infer"
LIMITS = {"header_timeout": 1, "body_timeout": 1, "min_body_rate": 1000, "keep_alive": 1, "write_timeout": 1}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that waits a second for everything."""
    path = write_artifact(tmp_path_factory.mktemp("artifacts") / "twice.laconic")
    with running(path, max_headers=4000, **LIMITS) as server:
        yield server


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def head_of(length: int, *, path: str = INFER) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n".encode()


BODY = json.dumps(request_of([[1, 2, 3]])).encode()


STOPPED = [
    (b"", b""),
    (b"\r\n\r\n", b"HTTP/1.1 408"),
    (b"POST /v2", b"HTTP/1.1 408"),
    (head_of(99)[:-2], b"HTTP/1.1 408"),
    (head_of(99), b"HTTP/1.1 408"),
    (head_of(99) + b'{"inputs', b"HTTP/1.1 408"),
    (head_of(99, path="/v1/models/twice/predict") + b'{"inputs', b"HTTP/1.1 408"),
    (head_of(99, path="/nothing") + b'{"inputs', b"HTTP/1.1 404"),
    (head_of(len(BODY)) + BODY, b"HTTP/1.1 200"),
    (head_of(len(BODY)) + BODY + b"POST", b"HTTP/1.1 200"),
]
"""What clients send that stop there, and how the answer begins."""


def test_clients_that_stop_in_the_middle_are_disconnected(strict: Running) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(strict)) for _ in STOPPED]
        for client, (sent, _) in zip(clients, STOPPED, strict=True):
            client.sendall(sent)
        for client, (sent, status) in zip(clients, STOPPED, strict=True):
            answer = read_all(client)
            assert answer.startswith(status), sent
            assert bool(answer) == bool(status), sent


def test_250_silent_connections_are_closed_and_others_are_served_meanwhile(strict: Running) -> None:
    with ExitStack() as stack, strict.client() as http:
        silent = [stack.enter_context(connect(strict)) for _ in range(250)]
        assert http.post(INFER, json=request_of([[1, 2, 3]])).status_code == 200
        assert all(read_all(client) == b"" for client in silent)


def test_a_body_that_trickles_below_the_rate_is_cut(strict: Running) -> None:
    with connect(strict) as client:
        client.sendall(head_of(10_000))
        answered = False
        for _ in range(100):
            time.sleep(0.1)
            try:
                client.sendall(b"x")
            except OSError:
                answered = True
                break
        assert answered


def test_a_slow_body_above_the_rate_is_read(strict: Running) -> None:
    with connect(strict) as client:
        client.sendall(head_of(len(BODY) + 20_000) + BODY)
        for _ in range(20):
            time.sleep(0.1)
            client.sendall(b" " * 1000)
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_a_request_that_takes_longer_than_every_deadline_is_answered(tmp_path: Path) -> None:
    path = change_artifact(write_artifact(tmp_path / "twice.laconic", seconds=3.0), knee=1)
    with running(path, **LIMITS) as server, server.client() as http:
        assert http.post(INFER, json=request_of([[1, 2, 3]])).status_code == 200


@pytest.mark.parametrize("headers", [b"a: " + b"x" * 100_000, b"a: b\r\n" * 50_000, b"x" * 100_000])
def test_headers_beyond_the_limit_get_431(strict: Running, headers: bytes) -> None:
    with connect(strict) as client:
        try:
            client.sendall(b"GET /v2 HTTP/1.1\r\n" + headers[:3000])
            time.sleep(0.2)
            client.sendall(headers[3000:6000])
            answer = read_all(client)
        except ConnectionResetError:
            pytest.fail("the connection was closed without an answer")
    assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_connections_beyond_the_limit_get_503_until_others_have_left(tmp_path: Path) -> None:
    with running(write_artifact(tmp_path / "twice.laconic"), max_connections=5) as server:
        with ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(connect(server))
            time.sleep(0.2)
            with connect(server) as client:
                assert read_all(client).startswith(b"HTTP/1.1 503")
        assert eventually(lambda: can_connect(server))


def can_connect(server: Running) -> bool:
    try:
        return httpx.get(f"{server.url}/v2").status_code == 200
    except httpx.TransportError:
        return False


def test_a_client_that_does_not_read_its_answer_is_disconnected(strict: Running) -> None:
    samples = {"inputs": [[1.23456789, 2.3456789, 3.456789]] * 4000}
    body = json.dumps(samples).encode()
    with connect(strict) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sent = 0
        client.settimeout(5)
        try:
            # Answers are larger than what the kernel buffers for the connection.
            for _ in range(200):
                client.sendall(head_of(len(body), path="/v1/models/twice/predict") + body)
                sent += 1
        except OSError:
            pass
        assert sent < 200


def test_a_client_that_hangs_up_is_noticed_on_every_server(tmp_path: Path) -> None:
    path = change_artifact(write_artifact(tmp_path / "twice.laconic", seconds=0.5), knee=1)
    with running(path, threads=1, queue_seconds=60) as server, ThreadPoolExecutor(1) as pool:
        model = server.app.repository.get("twice")
        first = pool.submit(httpx.post, f"{server.url}{INFER}", json=request_of([[1, 2, 3]]), timeout=20)
        assert eventually(lambda: server.batches("twice") == [1])
        with connect(server) as client:
            client.sendall(head_of(len(BODY)) + BODY)
            assert eventually(lambda: model.batcher.pending == 1)
        assert eventually(lambda: model.batcher.pending == 0)
        assert first.result().status_code == 200
    assert server.batches("twice") == [1]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("seconds", [0.0, 0.4])
def test_a_client_that_ends_its_side_gets_its_answers(tmp_path: Path, seconds: float, version: str) -> None:
    path = change_artifact(write_artifact(tmp_path / "twice.laconic", seconds=seconds), knee=1)
    request = (head_of(len(BODY)) + BODY).replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    count = 3 if version == "1.1" else 1
    with running(path, threads=1, queue_seconds=60) as server:
        with connect(server) as client:
            client.sendall(count * request)
            client.shutdown(socket.SHUT_WR)
            answers = read_all(client)
        assert answers.count(b"200 OK") == count
        assert answers.count(b'"data":[2.0,4.0,6.0]') == count
        if version == "1.0":
            assert b"100 Continue" not in answers


def test_a_client_that_ends_its_side_within_a_request_is_disconnected(strict: Running) -> None:
    for sent in (b"", b"POST /v2", head_of(99) + b"{"):
        with connect(strict) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            assert read_all(client) == b""


def test_half_sent_bodies_do_not_hold_the_exit(tmp_path: Path) -> None:
    with process(write_artifact(tmp_path / "twice.laconic"), drain=0) as (started, url):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as client:
            client.sendall(head_of(MIB) + b"x")
            time.sleep(0.3)
            started.send_signal(signal.SIGTERM)
            assert read_all(client).startswith(b"HTTP/1.1 503")
        assert started.wait(15) == 0
