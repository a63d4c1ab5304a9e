"""Load on a running server: a real one, with the fake engine."""

import asyncio
import json
import socket
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from artifacts import write_artifact
from served import Running, running, write_sequences

from laconic.loadtest.saturation_chart import draw_saturation
from laconic.loadtest.traffic import OK, Load, LoadPoint, Sample

pytestmark = pytest.mark.usefixtures("own_tasks")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    with running(write_artifact(folder / "twice.laconic"), write_sequences(folder / "lengths.laconic")) as server:
        yield server


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """20 batches a second of at most 4 rows, and a queue of 0.2 s."""
    path = write_artifact(tmp_path_factory.mktemp("artifacts") / "slow.laconic", seconds=0.05)
    with running(path, threads=1, queue_seconds=0.2) as server:
        yield server


def test_a_closed_loop_is_measured_and_drawn(server: Running, laconic, tmp_path: Path) -> None:
    chart = tmp_path / "curve.svg"
    given = ("bench", "--url", server.url, "--model", "twice", "--clients", "1,3", "--seconds", "0.3")
    code, out, _ = laconic(*given, "--chart", chart, "--json")
    points = json.loads(out)
    assert code == 0
    assert [(point["load"], point["value"]) for point in points] == [("clients", 1), ("clients", 3)]
    assert all(point["requests"] > 10 and point["errors"] == {} and point["goodput"] > 20 for point in points)
    assert set(points[0]["latencies"]) == {"p50", "p90", "p99", "p99.9"}
    assert ET.parse(chart).getroot().tag.endswith("svg")


def test_free_axes_get_the_length_that_is_asked_for(server: Running, laconic) -> None:
    given = ("bench", "--url", server.url, "--model", "lengths", "--clients", "1", "--seconds", "0.1")
    code, out, _ = laconic(*given, "--length", "64")
    assert (code, "none" in out) == (0, True)
    code, _, err = laconic(*given, "--length", "65")
    assert code == 2
    assert "expected 1 to 64" in err


def test_samples_of_a_file_go_to_the_predict_endpoint(server: Running, laconic, tmp_path: Path) -> None:
    data = tmp_path / "bodies.jsonl"
    data.write_text('{"inputs": {"x": [1, 2, 3]}}\n{"inputs": {"wrong": [1, 2, 3]}}\n')
    given = ("bench", "--url", server.url, "--model", "twice", "--clients", "2", "--seconds", "0.2", "--json")
    code, out, _ = laconic(*given, "--data", data)
    (point,) = json.loads(out)
    assert code == 0
    assert 0 < point["errors"]["400"] < point["requests"]


def test_an_open_loop_beyond_capacity_counts_rejections(slow: Running, laconic) -> None:
    code, out, _ = laconic("bench", "--url", slow.url, "--rate", "300", "--seconds", "1", "--json")
    (point,) = json.loads(out)
    assert code == 0
    assert point["load"] == "rate"
    assert point["errors"]["429"] > 50
    assert point["goodput"] < 200
    assert 200 < point["requests"] < 400


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), "nothing to measure"),
        (("x", "--url", "http://localhost:1"), "one of the two"),
        (("--url", "ftp://localhost"), "not the address of a server"),
        (("--url", "http://localhost:1"), "Is the server running?"),
        (("--url", "{url}"), "Choose one with --model"),
        (("--url", "{url}", "--model", "none"), "404"),
        (("--url", "{url}", "--model", "twice", "--clients", "0"), "positive integers"),
        (("--url", "{url}", "--model", "twice", "--data", "x.png"), "neither .txt nor .jsonl"),
        (("--url", "{url}", "--model", "twice", "--data", "missing.txt"), "cannot read"),
    ],
)
def test_bad_use_is_explained(server: Running, laconic, given: tuple[str, ...], told: str) -> None:
    code, _, err = laconic("bench", *(each.format(url=server.url) for each in given))
    assert code == 2
    assert told in " ".join(err.split())
    assert "Traceback" not in err


def test_an_open_loop_counts_the_wait_of_requests_behind_a_server_that_pauses() -> None:
    """It answers the first 20 at once, then nothing for half a second: with coordinated omission, one would be slow."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    stop = threading.Event()
    started = time.monotonic()

    def serve(connection: socket.socket) -> None:
        with connection:
            while connection.recv(4096):
                passed = time.monotonic() - started
                if 0.3 < passed < 0.8:
                    time.sleep(0.8 - passed)
                connection.sendall(answer)

    def accept(listener: socket.socket) -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        url = urlsplit(f"http://127.0.0.1:{listener.getsockname()[1]}")
        samples = asyncio.run(Load(url, [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"]).run_open(200, 1.0))
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
    slow = [sample for sample in samples if sample.ended - sample.due > 0.1]
    assert all(sample.outcome == OK for sample in samples)
    assert len(slow) > 40


def test_a_server_that_hangs_up_or_is_silent_is_an_error_and_no_exception() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = urlsplit(f"http://127.0.0.1:{listener.getsockname()[1]}")
        load = Load(url, [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"], timeout=0.1)
        samples = asyncio.run(load.run_closed(1, 0.15))
    assert {sample.outcome for sample in samples} <= {"timeout", "connection lost"}
    assert samples


def test_percentiles_are_of_answers_and_errors_are_counted_by_kind(tmp_path: Path) -> None:
    samples = [Sample(0.0, number / 1000, OK) for number in range(1, 1001)]
    point = LoadPoint.of("rate", 1000, [*samples, Sample(0.0, 2.0, "429"), Sample(0.0, 1.0, "429")])
    assert point.latencies == {"p50": 500, "p90": 900, "p99": 990, "p99.9": 999}
    assert (point.goodput, point.errors, point.requests) == (500, {"429": 2}, 1002)
    draw_saturation([point], "x & $y", tmp_path / "curve.svg")
    assert ET.parse(tmp_path / "curve.svg").getroot().tag.endswith("svg")
