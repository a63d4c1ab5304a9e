"""The header `Host`: what RFC 9112 asks of a request, and which hosts this server answers for."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Running, running

NAMED = b"host: localhost\r\n"


@pytest.fixture(scope="module", params=[(), ("example.com",)], ids=["any host", "its own hosts"])
def server(artifact: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(artifact, allowed_hosts=request.param) as server:
        yield server


def ask(server: Running, headers: bytes, *, path: str = "/v2", version: str = "1.1") -> bytes:
    """The status line of a request, and its body."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(f"GET {path} HTTP/{version}\r\n".encode() + headers + b"connection: close\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    return answer.partition(b"\r\n")[0] + answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("path", ["/v2", "/v2/health/ready", "/nothing"])
@pytest.mark.parametrize("headers", [b"", 2 * NAMED, b"Host: localhost\r\nHOST: example.com\r\n"])
def test_a_request_without_exactly_one_host_gets_400_whatever_came_before(
    server: Running, headers: bytes, path: str
) -> None:
    for _ in range(2):
        refused = ask(server, headers, path=path)
        assert refused.startswith(b"HTTP/1.1 400 ")
        assert b'{"error":"the request has ' in refused
        ask(server, NAMED)


def test_a_request_of_http_1_0_needs_no_host_unless_hosts_are_named(server: Running) -> None:
    expected = b"421" if server.app.settings.allowed_hosts else b"200"
    for _ in range(2):
        assert ask(server, b"", version="1.0").split()[1] == expected
        assert ask(server, b"", version="1.0", path="/v2/health/ready").split()[1] == b"200"
        assert ask(server, 2 * NAMED, version="1.0").split()[1] == b"400"
        assert ask(server, NAMED, version="1.0").split()[1] == b"200"


def test_an_empty_host_names_no_server(server: Running) -> None:
    expected = b"421" if server.app.settings.allowed_hosts else b"200"
    for _ in range(2):
        assert ask(server, b"host:\r\n").split()[1] == expected
        ask(server, NAMED)


def test_what_is_not_http_is_refused_in_json(server: Running) -> None:
    for request in (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", b"nonsense\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(request)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.endswith(b'{"error":"the request is not valid HTTP/1.1"}')
