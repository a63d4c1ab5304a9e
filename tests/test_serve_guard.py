"""Who may ask: keys, rates, hosts, and web pages of other origins."""

import base64
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Running, eventually, request_of, running
from test_serve_process import process
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from laconic.errors import UsageError
from serve.http.app import create_app
from serve.security.keys import RateLimited, TokenBucket, parse_keys
from serve.security.origin import Hosts, is_loopback, strip_port
from serve.settings.server_settings import Settings

pytestmark = pytest.mark.usefixtures("own_tasks")

INFER, PREDICT = "/v2/models/twice/infer", "/v1/models/twice/predict"
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
PAGE = {"origin": "https://app.example.com"}


@pytest.fixture(scope="module")
def locked(artifact: Path) -> Iterator[Running]:
    """A server with everything that refuses."""
    with running(
        artifact,
        api_keys=f"alice={ALICE} bob={BOB}",
        allowed_hosts="127.0.0.1,*.example.com",
        cors_origins="https://app.example.com",
        grpc_port=0,
    ) as server:
        yield server


def post(server: Running, path: str = INFER, **headers: str) -> httpx.Response:
    body = request_of([[1, 2, 3]]) if path == INFER else {"inputs": [[1, 2, 3]]}
    return httpx.post(
        f"{server.url}{path}", json=body, headers={name.replace("_", "-"): v for name, v in headers.items()}
    )


def basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'me:{password}'.encode()).decode()}"


@pytest.mark.parametrize("path", [INFER, PREDICT])
@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {ALICE}"},
        {"authorization": f"bearer {BOB}"},
        {"x_api_key": BOB},
        {"authorization": basic(ALICE)},
    ],
)
def test_a_request_with_a_key_is_answered(locked: Running, path: str, headers: dict[str, str]) -> None:
    assert post(locked, path, **headers).status_code == 200


@pytest.mark.parametrize("path", [INFER, PREDICT, "/v2/models/none/infer", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {ALICE}x"},
        {"authorization": "Bearer"},
        {"authorization": ALICE},
        {"authorization": "Basic %%%"},
        {"authorization": basic("")},
        {"x_api_key": ""},
        {"x_api_key": "alice"},
    ],
)
def test_a_request_without_a_known_key_gets_401(locked: Running, path: str, headers: dict[str, str]) -> None:
    answer = post(locked, path, **headers)
    assert answer.status_code == 401
    assert set(answer.json()) == {"error"}
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert ALICE not in answer.text


def infer_over_grpc(server: Running, rows: int = 1, **headers: str) -> Any:
    tensor = triton.InferInput("x", [rows, 3], "FP32")
    tensor.set_data_from_numpy(np.ones((rows, 3), np.float32))
    with triton.InferenceServerClient(server.grpc_address) as client:
        return client.infer("twice", [tensor], headers={name.replace("_", "-"): v for name, v in headers.items()})


def test_a_call_over_grpc_needs_a_key_unless_it_asks_for_health(locked: Running) -> None:
    assert infer_over_grpc(locked, authorization=f"Bearer {ALICE}").as_numpy("y").tolist() == [[2, 2, 2]]
    assert infer_over_grpc(locked, x_api_key=BOB).as_numpy("y").tolist() == [[2, 2, 2]]
    for headers in ({}, {"x_api_key": f"{BOB}x"}, {"authorization": "Bearer"}):
        with pytest.raises(InferenceServerException, match="key") as caught:
            infer_over_grpc(locked, **headers)
        assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
    with triton.InferenceServerClient(locked.grpc_address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("twice")
        with pytest.raises(InferenceServerException, match="key"):
            client.get_server_metadata()


def test_the_rate_of_a_key_holds_over_grpc(artifact: Path) -> None:
    with running(artifact, api_keys=f"alice={ALICE} bob={BOB}", rows_per_second=0.02, grpc_port=0) as server:
        infer_over_grpc(server, rows=3, x_api_key=ALICE)
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="rows per second") as caught:
                infer_over_grpc(server, x_api_key=ALICE)
            assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        assert post(server, x_api_key=ALICE).status_code == 429
        infer_over_grpc(server, x_api_key=BOB)


@pytest.mark.parametrize("path", ["/", "/v2", "/metrics", "/openapi.json", "/v2/models/twice", "/v2/models/stats"])
def test_everything_but_health_needs_the_key(locked: Running, path: str) -> None:
    assert httpx.get(f"{locked.url}{path}").status_code == 401
    assert httpx.get(f"{locked.url}{path}", headers={"x-api-key": ALICE}).status_code == 200


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/twice/ready"])
def test_health_is_open_to_everyone_under_any_name(locked: Running, path: str) -> None:
    assert httpx.get(f"{locked.url}{path}", headers={"host": "10.0.0.7:8000"}).status_code == 200


def test_a_browser_is_asked_for_the_key_of_the_page(locked: Running) -> None:
    assert httpx.get(locked.url).headers["www-authenticate"].startswith("Basic")
    page = httpx.get(locked.url, auth=("anyone", BOB))
    assert page.status_code == 200
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"


def test_the_connection_outlives_a_refusal(locked: Running) -> None:
    with locked.client() as http:
        for _ in range(3):
            assert http.post(INFER, json=request_of([[1, 2, 3]])).status_code == 401
        assert http.post(INFER, json=request_of([[1, 2, 3]]), headers={"x-api-key": ALICE}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "example.com", "127.0.0.1@evil.example", ""]
)
def test_a_host_that_this_server_is_not_gets_421(locked: Running, host: str) -> None:
    answer = post(locked, host=host, x_api_key=ALICE)
    assert answer.status_code == 421
    assert "allowed_hosts" in answer.json()["error"]


def test_names_are_compared_without_case_and_port() -> None:
    hosts = Hosts(["localhost", "[::1]", "*.Example.com"])
    for name in (b"LOCALHOST:80", b"[::1]:8000", b"a.b.example.com"):
        hosts.check(name)
    assert strip_port(b"[::1]:8000") == b"[::1]"
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.com")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_server_of_this_machine_alone_answers_to_its_own_names_alone(artifact: Path) -> None:
    with process(artifact, drain=0) as (_, url):
        assert httpx.get(f"{url}/v2").status_code == 200
        assert httpx.get(f"{url}/v2", headers={"host": "localhost:1"}).status_code == 200
        assert httpx.get(f"{url}/v2", headers={"host": "rebound.example"}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "http://{host}", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_a_page_of_another_origin_cannot_ask(locked: Running, headers: dict[str, str]) -> None:
    headers = {name: value.format(host=f"127.0.0.1:{locked.port}") for name, value in headers.items()}
    answer = post(locked, x_api_key=ALICE, **headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [{}, {"origin": "http://{host}"}, {"origin": "http://{host}", "sec_fetch_site": "same-origin"}],
)
def test_the_servers_own_page_can_ask(locked: Running, headers: dict[str, str]) -> None:
    headers = {name: value.format(host=f"127.0.0.1:{locked.port}") for name, value in headers.items()}
    assert post(locked, x_api_key=ALICE, **headers).status_code == 200


def test_a_page_of_an_allowed_origin_can_ask_and_read(locked: Running) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-api-key"}
    preflight = httpx.options(f"{locked.url}{INFER}", headers=PAGE | ask)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == PAGE["origin"]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "content-type,x-api-key"
    for answer in (post(locked, x_api_key=ALICE, sec_fetch_site="cross-site", **PAGE), post(locked, **PAGE)):
        assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
        assert answer.headers["vary"] == "Origin"
        assert "Retry-After" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    refused = httpx.options(f"{locked.url}{INFER}", headers={"origin": "https://evil.example"} | ask)
    assert refused.status_code >= 400
    assert "access-control-allow-origin" not in refused.headers


def test_every_origin_can_be_allowed_and_none_is_by_default(artifact: Path) -> None:
    with running(artifact, cors_origins="*") as server:
        assert post(server, **PAGE).headers["access-control-allow-origin"] == PAGE["origin"]
    with running(artifact) as server:
        assert post(server, **PAGE).status_code == 403
        assert post(server).status_code == 200


def test_a_rate_of_requests_holds_for_each_key(artifact: Path) -> None:
    with running(artifact, api_keys=f"alice={ALICE}\nbob={BOB}", requests_per_second=0.02) as server:
        assert post(server, x_api_key=ALICE).status_code == 200
        refused = post(server, x_api_key=ALICE)
        assert refused.status_code == 429
        assert 40 <= int(refused.headers["retry-after"]) <= 50
        assert "0.02 requests per second" in refused.json()["error"]
        assert httpx.get(f"{server.url}/v2/health/ready", headers={"x-api-key": ALICE}).status_code == 200
        assert post(server, x_api_key=BOB).status_code == 200


def test_metrics_count_what_each_key_asks_and_what_is_refused(artifact: Path) -> None:
    with running(artifact, api_keys=f"alice={ALICE} bob={BOB}") as server:
        post(server, x_api_key=ALICE)
        post(server, PREDICT, x_api_key=ALICE)
        post(server)
        text = httpx.get(f"{server.url}/metrics", headers={"x-api-key": BOB}).text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["laconic_key_requests_total", "alice"] == samples["laconic_key_rows_total", "alice"] == 2
    assert samples["laconic_key_requests_total", "bob"] == 1
    assert samples["laconic_refused_requests_total", "401"] == 1
    assert samples["laconic_connections",] == 1
    assert ALICE not in text


def test_a_rate_of_rows_counts_tensors_and_samples_and_says_rightly_when_to_come_back(artifact: Path) -> None:
    with running(artifact, api_keys=f"alice={ALICE}", rows_per_second=20) as server, server.client() as http:
        http.headers["x-api-key"] = ALICE
        assert http.post(PREDICT, json={"inputs": [[1, 2, 3]] * 40}).status_code == 200
        refused = http.post(INFER, json=request_of([[1, 2, 3]] * 20))
        assert refused.status_code == 429
        assert "20 rows per second" in refused.json()["error"]
        time.sleep(int(refused.headers["retry-after"]))
        assert http.post(INFER, json=request_of([[1, 2, 3]] * 20)).status_code == 200


def test_a_request_larger_than_the_rate_is_answered_and_paid_back() -> None:
    bucket = TokenBucket(10, "rows")
    now = bucket._filled
    bucket.take(40, now)
    with pytest.raises(RateLimited) as caught:
        bucket.take(5, now)
    assert caught.value.retry_after == 4  # 3 s of debt, and a tenth of a second for the next row, in whole seconds
    with pytest.raises(RateLimited):
        bucket.take(0, now + 2.9)
    bucket.take(5, now + 4)
    bucket.take(5, now + 4)


def test_keys_are_read_again_on_sighup(artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\nalice={ALICE}\n")
    with process(artifact, drain=0, api_key_file=str(file)) as (started, url):

        def status(key: str) -> int:
            return httpx.get(f"{url}/v2", headers={"x-api-key": key}).status_code

        assert (status(ALICE), status(BOB)) == (200, 401)
        file.write_text(f"bob={BOB}\n")
        started.send_signal(signal.SIGHUP)
        assert eventually(lambda: (status(ALICE), status(BOB)) == (401, 200))
        file.write_text("rubbish")
        started.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert status(BOB) == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_keys": "alice=short"}, "api_keys, line 1: expected NAME=KEY"),
        ({"api_keys": f"{ALICE}"}, "openssl rand"),
        ({"api_keys": f"a={ALICE}\na={BOB}"}, "line 2: there are two keys 'a'"),
        ({"api_key_file": "/nowhere/keys"}, "/nowhere/keys does not read"),
        ({"api_key_file": "/dev/null"}, "is empty"),
        ({"requests_per_second": 5}, "there are no keys"),
        ({"allowed_hosts": "a.example,https://b.example"}, "'https://b.example' in allowed_hosts"),
        ({"allowed_hosts": "a.example:443"}, "without a scheme and a port"),
        ({"cors_origins": "app.example.com"}, "Give one like https"),
        ({"cors_origins": "https://app.example.com/"}, "is no origin"),
    ],
)
def test_settings_that_let_nobody_or_everybody_in_are_refused(
    artifact: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        create_app([artifact], Settings.model_validate(options))
    assert ALICE not in str(caught.value)


def test_keys_do_not_show_in_what_is_printed_of_settings() -> None:
    assert ALICE not in repr(Settings(api_keys=f"alice={ALICE}"))
    assert parse_keys(f"a={ALICE} # b={BOB}\n\n", "x") == {"a": ALICE}
