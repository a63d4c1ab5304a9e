"""What is told of requests beside their answers: ids, lines in the log, traces."""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
from artifacts import write_artifact
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from served import Running, eventually, request_of, running
from test_serve_process import process
from tritonclient import grpc as triton
from tritonclient import http as triton_http

from laconic.errors import MissingPackage
from serve.observation import logs
from serve.observation.tracing import MAX_PARTS, Tracing

pytestmark = pytest.mark.usefixtures("own_tasks")

INFER, PREDICT = "/v2/models/twice/infer", "/v1/models/twice/predict"
KEY = "alice-0123456789abcdef"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("artifacts") / "twice.laconic", poison=666.0)


def test_a_sane_request_id_is_sent_back_and_another_is_not(artifact: Path) -> None:
    with running(artifact) as server, server.client() as http:
        assert http.get("/v2", headers={"x-request-id": "abc-123:4"}).headers["x-request-id"] == "abc-123:4"
        for insane in (b"a b", b"x" * 129, "é".encode(), b"<script>"):
            assert len(http.get("/v2", headers=[(b"x-request-id", insane)]).headers["x-request-id"]) == 32
        assert "x-request-id" not in http.get("/v2").headers


def lines_of(artifact: Path, requests: Any, **options: Any) -> list[str]:
    """The lines of the log of a server that got these requests."""
    with process(artifact, drain=0, **options) as (started, url):
        with httpx.Client(base_url=url, timeout=20) as http:
            requests(http)
        started.terminate()
        return started.communicate(timeout=20)[1].splitlines()


def test_the_log_in_json_has_a_line_for_each_request_with_its_id_and_key(artifact: Path) -> None:
    ids = []

    def ask(http: httpx.Client) -> None:
        http.headers["x-api-key"] = KEY
        assert http.post(INFER, json=request_of([[1, 2, 3]]), headers={"x-request-id": "mine"}).status_code == 200
        ids.append(http.post(INFER, json=request_of([[666, 2, 3]])).headers["x-request-id"])
        http.get("/%0aFAKE", headers={"x-api-key": "wrong"})

    options = {"log_format": "json", "access_log": 1, "api_keys": f"alice={KEY}"}
    lines = [json.loads(line) for line in lines_of(artifact, ask, **options)]
    found = {line.get("request_id"): line for line in lines if line["logger"] == "laconic.serve.access"}
    assert len(found) == 3
    assert found["mine"]["path"] == INFER
    assert (found["mine"]["status"], found["mine"]["method"], found["mine"]["key"]) == (200, "POST", "alice")
    assert found["mine"]["client"] == "127.0.0.1"
    assert found["mine"]["duration_ms"] > 0
    assert found[ids[0]]["status"] == 500
    (fake,) = [line for line in found.values() if "FAKE" in line["path"]]
    assert (fake["path"], fake["status"], "key" in fake) == ("/%0aFAKE", 401, False)
    assert any(line["level"] == "error" and "engine failed" in line["message"] for line in lines)
    assert all(KEY not in json.dumps(line) for line in lines)


def test_requests_are_logged_in_text_too_but_only_when_asked_for(artifact: Path) -> None:
    def ask(http: httpx.Client) -> None:
        http.get("/%0aFAKE", headers={"x-request-id": "mine"})

    (line,) = lines_of(artifact, ask, access_log=1)
    assert "INFO laconic.serve.access [mine]: GET /%0aFAKE 404 in " in line

    def ask(http: httpx.Client) -> None:
        assert len(http.get("/v2").headers["x-request-id"]) == 32

    assert lines_of(artifact, ask, log_format="json") == []
    assert lines_of(artifact, lambda http: http.get("/v2")) == []


def test_a_log_that_nobody_reads_holds_up_neither_requests_nor_the_exit(artifact: Path) -> None:
    with process(artifact, drain=0, log_format="json", access_log=1) as (started, url):
        with httpx.Client(base_url=url, timeout=20) as http:
            path = "/" + "x" * 4000
            for _ in range(40):  # more than a pipe holds
                assert http.get(path).status_code == 404
        started.terminate()
        assert started.wait(10) == 0


def write_log(*texts: str) -> None:
    """Have these lines written; pytest, which keeps what is logged, takes no name that is not UTF-8."""
    lines: Queue[logging.LogRecord | None] = Queue()
    for text in texts:
        lines.put(logging.makeLogRecord({"msg": text}))
    lines.put(None)
    logs.write_lines(lines)


def test_neither_a_name_outside_utf_8_nor_a_failed_write_ends_the_log(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(f"{os.fsdecode(b'/models/na' + bytes([255]) + b'me')} cannot be read", "the next line")
    assert capfd.readouterr().err.splitlines() == ["/models/na\\udcffme cannot be read", "the next line"]
    with (tmp_path / "log").open("wb") as file:
        descriptors = iter([-1, file.fileno()])  # the first is closed
        monkeypatch.setattr(logs.os, "write", lambda _, content, write=os.write: write(next(descriptors), content))
        write_log("one", "two")
    assert (tmp_path / "log").read_text() == "two\n"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(artifact: Path, spans: InMemorySpanExporter) -> Iterator[Running]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with running(artifact, grpc_port=0, workers=0, otlp_endpoint="http://127.0.0.1:9") as server:
        server.app.observer.tracing.close()
        server.app.observer.tracing = Tracing(provider)
        yield server


def finished(spans: InMemorySpanExporter, name: str) -> dict[str, list[ReadableSpan]]:
    """The spans by name, when that of the request has ended."""
    assert eventually(lambda: any(span.name == name for span in spans.get_finished_spans()))
    found: dict[str, list[ReadableSpan]] = {}
    for span in spans.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def check_steps(found: dict[str, list[ReadableSpan]], root: ReadableSpan) -> None:
    """All spans are of the request's trace and lie within it, the engine's within the batch's."""
    for step in ("encode", "queue", "batch", "engine", "write"):
        for span in found[step]:
            assert span.context.trace_id == root.context.trace_id
            assert root.start_time <= span.start_time + 1_000_000
            assert span.start_time <= span.end_time <= root.end_time + 1_000_000
            parents = found["batch"] if step == "engine" else [root]
            assert span.parent.span_id in [parent.context.span_id for parent in parents]


def test_a_request_with_a_traceparent_joins_its_trace(traced: Running, spans: InMemorySpanExporter) -> None:
    with traced.client() as http:
        headers = SAMPLED | {"x-request-id": "mine"}
        assert http.post(INFER, json=request_of([[1, 2, 3]] * 2), headers=headers).status_code == 200
    found = finished(spans, "POST /v2/models/{name}/infer")
    (root,) = found["POST /v2/models/{name}/infer"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["laconic.request_id"] == "mine"
    assert [len(found[step]) for step in ("encode", "queue", "batch", "engine", "write")] == [1] * 5
    assert found["engine"][0].attributes["laconic.rows"] == 2
    check_steps(found, root)


def test_samples_are_traced_each_up_to_a_bound(traced: Running, spans: InMemorySpanExporter) -> None:
    httpx.post(f"{traced.url}{PREDICT}", json={"inputs": [[1, 2, 3]] * (MAX_PARTS + 8)})
    found = finished(spans, "POST /v1/models/{name}/predict")
    (root,) = found["POST /v1/models/{name}/predict"]
    assert root.parent is None
    assert len(found["queue"]) == MAX_PARTS
    check_steps(found, root)


def test_a_request_that_its_caller_does_not_sample_is_not_traced(traced: Running, spans: InMemorySpanExporter) -> None:
    for headers in ({"traceparent": f"00-{TRACE}-{PARENT}-00"}, {"traceparent": "rubbish"}):
        assert httpx.get(f"{traced.url}/v2", headers=headers).status_code == 200
    finished(spans, "GET /v2")
    (root,) = spans.get_finished_spans()
    assert root.parent is None


def test_repeated_binary_requests_are_traced_too(traced: Running, spans: InMemorySpanExporter) -> None:
    tensor = triton_http.InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 3), np.float32))
    with triton_http.InferenceServerClient(traced.address) as client:
        for _ in range(3):
            client.infer("twice", [tensor])
    assert eventually(lambda: len([span for span in spans.get_finished_spans() if span.name == "engine"]) == 3)


def test_a_call_over_grpc_joins_the_trace_in_its_metadata(traced: Running, spans: InMemorySpanExporter) -> None:
    tensor = triton.InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 3), np.float32))
    with triton.InferenceServerClient(traced.grpc_address) as client:
        client.infer("twice", [tensor], headers=SAMPLED)
    name = "/inference.GRPCInferenceService/ModelInfer"
    found = finished(spans, name)
    (root,) = found[name]
    assert f"{root.context.trace_id:032x}" == TRACE
    check_steps(found, root)


def test_traces_are_sent_to_the_endpoint(artifact: Path) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/"
        with running(artifact, otlp_endpoint=endpoint) as server:
            httpx.get(f"{server.url}/v2")
        collector.shutdown()
    assert [path for path, _ in received] == ["/v1/traces"]
    assert b"laconic" in received[0][1]


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingPackage, match=r"laconic\[otel\]"):
        Tracing.open("http://localhost:4318")
