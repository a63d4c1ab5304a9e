"""TLS, and the address of operators."""

import http.client
import re
import shutil
import socket
import ssl
import stat
import subprocess
import time
from pathlib import Path

import grpc
import httpx
import pytest
from served import eventually, request_of, running
from test_serve_process import process
from tritonclient import grpc as triton

from laconic.errors import UsageError
from serve.asgi.listener import open_admin, open_unix
from serve.security.tls import load_certificate
from serve.settings.server_settings import Settings

pytestmark = pytest.mark.usefixtures("own_tasks")

INFER = "/v2/models/twice/infer"
ADMIN = ("/metrics", "/v2/models/stats", "/v2/models/twice/config", "/v2/models/twice/versions/1/stats")
KEY = "alice-0123456789abcdef"


def certify(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 with its key, as files."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


def served_certificate(url: str) -> str:
    host, port = url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port)), timeout=10).strip()


def test_requests_come_over_tls_and_a_renewed_certificate_is_served_without_a_restart(
    artifact: Path, tmp_path: Path
) -> None:
    cert, key = certify(tmp_path / "served", "first")
    with process(artifact, drain=0, tls_cert=str(cert), tls_key=str(key)) as (started, url):
        assert url.startswith("https://")
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(cert)), timeout=20) as client:
            assert client.post(INFER, json=request_of([[1, 2, 3]])).status_code == 200
            assert served_certificate(url) == cert.read_text().strip()
            renewed, renewed_key = certify(tmp_path / "renewed", "second")
            shutil.copy(renewed, cert)  # the key does not fit yet
            time.sleep(1.2)
            first = served_certificate(url)
            assert first != cert.read_text().strip()
            shutil.copy(renewed_key, key)
            assert eventually(lambda: served_certificate(url) == renewed.read_text().strip())
            assert client.get("/v2").status_code == 200  # over the connection that was open all the time
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"))
        started.terminate()
        assert started.wait(10) == 0


def test_grpc_comes_over_tls_too(artifact: Path, tmp_path: Path) -> None:
    cert, key = certify(tmp_path / "served", "first")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"tls_cert": str(cert), "tls_key": str(key), "grpc_port": port, "drain": 0}
    with process(artifact, **options):

        def is_live(root: Path) -> bool:
            credentials = grpc.ssl_channel_credentials(root.read_bytes())
            with triton.InferenceServerClient(f"127.0.0.1:{port}", ssl=True, creds=credentials) as client:
                try:
                    return bool(client.is_server_live())
                except triton.InferenceServerException:
                    return False

        assert is_live(cert)
        renewed, renewed_key = certify(tmp_path / "renewed", "second")
        assert not is_live(renewed)
        shutil.copy(renewed_key, key)
        shutil.copy(renewed, cert)
        assert eventually(lambda: is_live(renewed), 10)


def test_a_client_that_does_not_finish_its_handshake_is_disconnected(artifact: Path, tmp_path: Path) -> None:
    cert, key = certify(tmp_path / "served", "first")
    with process(artifact, drain=0, tls_cert=str(cert), tls_key=str(key), header_timeout=1) as (_, url):
        silent = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)
        assert silent.recv(1) == b""
        silent.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls_cert": "cert.pem"}, "Give both --tls-cert and --tls-key"),
        ({"tls_cert": "none.pem", "tls_key": "key.pem"}, "none.pem and .* are not a certificate"),
        ({"tls_cert": "key.pem", "tls_key": "key.pem"}, "are not a certificate"),
        ({"tls_cert": "cert.pem", "tls_key": "other.pem"}, "are not a certificate"),
        ({"tls_cert": "cert.pem", "tls_key": "locked.pem"}, "not encrypted"),
    ],
)
def test_files_that_are_no_certificate_are_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    _, key = certify(tmp_path, "first")
    shutil.copy(certify(tmp_path / "other", "other")[1], tmp_path / "other.pem")
    command = ["openssl", "ec", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(tmp_path / "locked.pem")]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(UsageError, match=message):
        load_certificate(Settings.model_validate({name: tmp_path / value for name, value in options.items()}))


def test_operators_have_a_port_of_their_own(artifact: Path) -> None:
    with process(artifact, drain=0, admin="0", api_keys=f"alice={KEY}") as (started, url):
        assert started.stdout
        found = re.search(r"operators at (\S+)", started.stdout.readline())
        assert found
        keys = {"x-api-key": KEY}
        with (
            httpx.Client(base_url=f"http://{found[1]}", headers=keys) as admin,
            httpx.Client(base_url=url, headers=keys) as client,
        ):
            for path in ADMIN:
                assert admin.get(path).status_code == 200
                assert client.get(path).status_code == 404
            assert client.post("/v2/repository/index").status_code == 404
            assert admin.post("/v2/repository/index").status_code == 200
            assert client.post(INFER, json=request_of([[1, 2, 3]])).status_code == 200
            assert admin.post(INFER, json=request_of([[1, 2, 3]])).status_code == 404
            assert "and not here" in admin.get("/").json()["error"]
            for each in (admin, client):
                assert each.get("/v2/health/ready", headers={"x-api-key": ""}).status_code == 200
                assert each.get("/v2/models/twice/ready").status_code == 200
        assert httpx.get(f"http://{found[1]}/metrics").status_code == 401


def test_the_calls_of_operators_are_not_answered_over_grpc_beside_an_address_of_their_own(artifact: Path) -> None:
    with running(artifact, grpc_port=0, admin="9000") as server:
        client = triton.InferenceServerClient(server.grpc_address)
        for call in (client.get_model_repository_index, client.get_inference_statistics):
            with pytest.raises(triton.InferenceServerException, match="operators") as caught:
                call()
            assert caught.value.status() == "StatusCode.NOT_FOUND"
        assert client.get_model_metadata("twice").name == "twice"
        client.close()


class UnixConnection(http.client.HTTPConnection):
    """To a unix socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self.host)


def ask(path: Path, route: str) -> int:
    connection = UnixConnection(str(path))
    connection.request("GET", route, headers={"Host": "anything"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_unix_socket_is_for_those_who_may_open_it(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:  # as by a server that was killed
        left_behind.bind(str(path))
    cert, key = certify(tmp_path / "served", "first")
    options = {"tls_cert": str(cert), "tls_key": str(key), "admin": f"unix:{path}", "api_keys": f"alice={KEY}"}
    with process(artifact, drain=0, **options) as (started, _):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [ask(path, route) for route in (*ADMIN, "/v2/health/ready", INFER)] == [200, 200, 200, 200, 200, 404]
        with pytest.raises(UsageError, match=f"cannot listen on {path}"):
            open_unix(path)
        started.terminate()
        assert started.wait(10) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    "address", ["", "x", "localhost:", "unix:", "unix:/nowhere/admin.sock", "70000", "192.0.2.1:80"]
)
def test_an_address_of_operators_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UsageError):
        open_admin(address)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("x")
    with pytest.raises(UsageError, match="Choose another path"):
        open_unix(path)
    assert path.read_text() == "x"
