"""What happens when requests meet in a batch, in the queue, or leave it."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from artifacts import write_artifact
from served import Running, change_artifact, request_of, running, write_sequences

pytestmark = pytest.mark.usefixtures("own_tasks")

CLIENTS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def slow(folder: Path) -> Iterator[Running]:
    """A model of 0.3 s per batch of up to 8 rows, one batch at a time, and a queue of 20 rows; 666 is poison."""
    path = write_artifact(folder / "slow.laconic", seconds=0.3, poison=666.0)
    with running(change_artifact(path, knee=8), threads=1, queue_seconds=1.0) as server:
        yield server


@pytest.fixture(scope="module")
def fast(folder: Path) -> Iterator[Running]:
    paths = [
        change_artifact(write_artifact(folder / "rows.laconic"), knee=8),
        change_artifact(write_artifact(folder / "alone.laconic"), knee=8, batching=False),
        write_sequences(folder / "shapes.laconic"),
        write_sequences(folder / "padded.laconic", task="padded", seconds=0.02),
    ]
    with running(*paths) as server:
        yield server


async def post_all(server: Running, name: str, requests: list[dict]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=20, limits=limits) as client:
        return await asyncio.gather(*(client.post(f"/v2/models/{name}/infer", json=each) for each in requests))


def data(response: httpx.Response) -> list[float]:
    assert response.status_code == 200, response.text
    return response.json()["outputs"][0]["data"]


def test_each_of_64_concurrent_clients_gets_its_own_rows(fast: Running) -> None:
    def client(number: int) -> None:
        with fast.client() as http:
            for turn in range(5):
                rows = np.full((1 + (number + turn) % 3, 3), number * 100 + turn, np.float32)
                answer = http.post("/v2/models/rows/infer", json=request_of(rows))
                assert data(answer) == (2 * rows).ravel().tolist()

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    assert max(fast.batches("rows")) <= 8


def test_waiting_requests_share_batches_up_to_the_measured_knee(slow: Running) -> None:
    seen = len(slow.batches("slow"))
    answers = asyncio.run(post_all(slow, "slow", [request_of([[number] * 3]) for number in range(17)]))
    assert [data(answer) for answer in answers] == [[2 * number] * 3 for number in range(17)]
    batches = slow.batches("slow")[seen:]
    assert sum(batches) == 17
    assert max(batches) == 8
    assert len(batches) <= 5


def test_a_bad_row_in_a_batch_fails_only_its_own_request(slow: Running) -> None:
    requests = [request_of([[666.0 if number == 5 else number] * 3]) for number in range(12)]
    answers = asyncio.run(post_all(slow, "slow", requests))
    assert [answer.status_code for answer in answers] == [500 if number == 5 else 200 for number in range(12)]
    assert answers[5].json() == {"error": "the engine failed on these inputs; the server's log says why"}
    assert all(data(answers[number]) == [2 * number] * 3 for number in range(12) if number != 5)


def test_a_model_whose_answers_depend_on_the_batch_runs_one_row_at_a_time(fast: Running) -> None:
    asyncio.run(post_all(fast, "alone", [request_of([[number] * 3] * 2) for number in range(4)]))
    assert set(fast.batches("alone")) == {1}


def test_lengths_are_padded_to_share_a_batch_where_there_is_a_padding_value(fast: Running) -> None:
    seen = len(fast.batches("padded"))
    rows = [np.full((1, 1 + number % 9), number, np.float32) for number in range(40)]
    answers = asyncio.run(post_all(fast, "padded", [request_of(row) for row in rows]))
    for row, answer in zip(rows, answers, strict=True):
        assert answer.json()["outputs"][0]["shape"] == list(row.shape)
        assert data(answer) == (2 * row).ravel().tolist()
    assert len(fast.batches("padded")) - seen < 40
    rows = [np.full((1, 1 + number % 4), number, np.float32) for number in range(40)]
    answers = asyncio.run(post_all(fast, "shapes", [request_of(row) for row in rows]))
    assert [data(answer) for answer in answers] == [(2 * row).ravel().tolist() for row in rows]


def test_a_full_queue_answers_429_and_recovers(slow: Running) -> None:
    answers = asyncio.run(post_all(slow, "slow", [request_of([[number] * 3]) for number in range(CLIENTS)]))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(answer.status_code in (200, 429) for answer in answers)
    assert all(answer.headers["retry-after"] == "1" and "queue is full" in answer.json()["error"] for answer in refused)
    with slow.client() as http:
        assert data(http.post("/v2/models/slow/infer", json=request_of([[1, 2, 3]]))) == [2, 4, 6]


def test_a_request_whose_timeout_passes_in_the_queue_gets_504_and_is_never_run(slow: Running) -> None:
    before = sum(slow.batches("slow"))
    requests = [request_of([[number] * 3] * 8) for number in range(2)]
    late = [request_of([[9] * 3], timeout=20_000) for _ in range(3)]

    async def post() -> list[httpx.Response]:
        first = asyncio.ensure_future(post_all(slow, "slow", requests))
        await asyncio.sleep(0.05)
        answers = await post_all(slow, "slow", late)
        await first
        return answers

    answers = asyncio.run(post())
    assert [answer.status_code for answer in answers] == [504] * 3
    assert sum(slow.batches("slow")) - before == 16
    with slow.client() as http:
        answer = http.post("/v2/models/slow/infer", json=request_of([[1, 2, 3]], timeout=5_000_000))
    assert data(answer) == [2, 4, 6]


def test_samples_of_one_predict_request_travel_on_their_own(slow: Running) -> None:
    before = len(slow.batches("slow"))
    samples = [{"x": [number] * 3} for number in range(10)]
    with slow.client() as http:
        answer = http.post("/v1/models/slow/predict", json={"inputs": samples})
    assert answer.json() == {"model": "slow", "answers": [{"y": [2 * number] * 3} for number in range(10)]}
    batches = slow.batches("slow")[before:]
    assert sum(batches) == 10
    assert len(batches) <= 4, "how many are encoded when an engine is free varies"
