"""One large request beside others: whose rows run when, who is turned away, and what is left undone."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from artifacts import X, Y, write_artifact
from hypothesis import given
from hypothesis import strategies as st
from served import change_artifact, eventually, running

from serve.batching.fair_queue import FairQueue, Flow, Item
from serve.batching.layout import Cap, Layout, Part
from serve.batching.throughput import Throughput

pytestmark = pytest.mark.usefixtures("own_tasks")

CAP = Cap(8)
LAYOUT = Layout((X,), (Y,))
LOOP = asyncio.new_event_loop()


def part(rows: int = 1) -> Part:
    return Part({"x": np.zeros((rows, 3), np.float32)}, rows, {})


def put(queue: FairQueue, items: int) -> Flow:
    """A request of so many single rows in the queue."""
    flow = queue.open(items)
    queue.announce(flow)
    queue.put(flow, [Item(flow, part(), LOOP.create_future()) for _ in range(items)])
    return flow


def taken_from(batch: list[Item], flow: Flow) -> int:
    return sum(item.flow is flow for item in batch)


@given(st.lists(st.integers(9, 60), min_size=1, max_size=12))
def test_bulk_requests_share_the_batches_evenly_whatever_their_size(sizes: list[int]) -> None:
    queue = FairQueue(LAYOUT, CAP)
    flows = [put(queue, size) for size in sizes]
    served = dict.fromkeys(map(id, flows), 0)
    while all(len(flow.items) >= CAP.rows for flow in flows):
        for item in queue.form_bulk(once=False):
            served[id(item.flow)] += 1
        assert max(served.values()) - min(served.values()) <= 1


@given(st.lists(st.integers(1, 40), max_size=30))
def test_each_row_runs_once_in_the_order_of_its_request(sizes: list[int]) -> None:
    queue = FairQueue(LAYOUT, CAP)
    flows = [put(queue, size) for size in sizes]
    expected = {id(flow): list(flow.items) for flow in flows}
    ran: dict[int, list[Item]] = {id(flow): [] for flow in flows}
    while batch := queue.form_small(with_bulk=True) or queue.form_bulk(once=False):
        assert len(batch) <= CAP.rows
        for item in batch:
            ran[id(item.flow)].append(item)
    assert ran == expected
    assert queue.rows_ahead(10**6) == 0
    assert not queue.small
    assert not queue.bulk


def test_a_small_request_is_in_the_next_batch_which_bulk_rows_fill_only_where_told() -> None:
    queue = FairQueue(LAYOUT, CAP)
    bulk, small = put(queue, 3000), put(queue, 1)
    batch = queue.form_small(with_bulk=True)
    assert taken_from(batch, small) == 1
    assert taken_from(batch, bulk) == 1
    queue = FairQueue(LAYOUT, CAP)
    put(queue, 3000)
    put(queue, 2)
    assert len(queue.form_small(with_bulk=False)) == 2


def test_a_length_that_does_not_fit_opens_the_next_batch() -> None:
    queue = FairQueue(Layout((X,), (Y,)), CAP)
    flows = []
    for number in range(6):
        flow = queue.open(1)
        queue.announce(flow)
        sized = Part(part().inputs, 1, {"seq": 1 + number % 2})
        queue.put(flow, [Item(flow, sized, LOOP.create_future())])
        flows.append(flow)
    assert [item.flow for item in queue.form_small(with_bulk=False)] == flows[0::2]
    assert [item.flow for item in queue.form_small(with_bulk=False)] == flows[1::2]


def test_what_runs_before_a_request_is_what_turns_give_the_others() -> None:
    queue = FairQueue(LAYOUT, CAP)
    bulk = put(queue, 3000)
    for _ in range(5):
        put(queue, 2)
    assert queue.rows_ahead(1) == 10 + 1
    assert queue.rows_ahead(500) == 10 + 500
    assert queue.rows_ahead(10_000) == 10 + 3000
    assert len(queue.drop(bulk)) == 3000
    assert queue.rows_ahead(10_000) == 10
    assert queue.form_bulk(once=False) == []


@given(st.floats(0, 1), st.floats(1e-4, 0.1), st.lists(st.integers(1, 8), min_size=2).filter(lambda x: len(set(x)) > 1))
def test_the_rate_of_full_batches_is_read_off_batches_of_any_size(start: float, each: float, sizes: list[int]) -> None:
    throughput = Throughput(executors=2, cap=8)
    for rows in [*sizes[-10:], 1, 8]:
        throughput.count(rows, start + each * rows)
    assert 160 * throughput.seconds_per_row == pytest.approx(10 * (start + 8 * each), rel=0.02)
    assert Throughput(executors=1, cap=8).seconds_per_row == 0


def test_single_rows_beside_3000_samples_are_all_answered_and_wait_for_two_batches_at_most(tmp_path: Path) -> None:
    path = change_artifact(write_artifact(tmp_path / "slow.laconic", seconds=0.02), knee=8)
    with running(path, threads=2, queue_seconds=1) as server, server.client() as http, ThreadPoolExecutor(1) as pool:
        http.post("/v1/models/slow/predict", json={"inputs": [[1, 2, 3]] * 8})
        large = pool.submit(http.post, "/v1/models/slow/predict", json={"inputs": [[1, 2, 3]] * 3000})
        batches = server.batches
        assert eventually(lambda: len(batches("slow")) > 10)
        with server.client() as other:
            for number in range(20):
                before = len(batches("slow"))
                answer = other.post("/v1/models/slow/predict", json={"inputs": [[number] * 3]})
                assert answer.json()["answers"] == [{"y": [2 * number] * 3}]
                # Its own, and what the other executor ran meanwhile; 375 batches of the large request are left.
                assert len(batches("slow")) - before < 60
            assert not large.done()
        assert large.result().json()["answers"] == [{"y": [2, 4, 6]}] * 3000


def test_a_second_large_request_is_told_when_to_come_back(tmp_path: Path) -> None:
    path = change_artifact(write_artifact(tmp_path / "slow.laconic", seconds=0.05), knee=8)
    with running(path, threads=1) as server, server.client() as http, ThreadPoolExecutor(1) as pool:
        http.post("/v1/models/slow/predict", json={"inputs": [[1, 2, 3]] * 9})
        large = pool.submit(http.post, "/v1/models/slow/predict", json={"inputs": [[1, 2, 3]] * 900})
        assert eventually(lambda: len(server.batches("slow")) > 10)
        answer = httpx.post(f"{server.url}/v1/models/slow/predict", json={"inputs": [[1, 2, 3]] * 900})
        assert answer.status_code == 429
        assert 2 <= int(answer.headers["retry-after"]) <= 60
        assert f"Try again in {answer.headers['retry-after']} s" in answer.json()["error"]
        assert large.result().status_code == 200


def test_more_samples_than_the_limit_get_400(tmp_path: Path) -> None:
    with running(write_artifact(tmp_path / "twice.laconic"), max_rows=5) as server, server.client() as http:
        answer = http.post("/v1/models/twice/predict", json={"inputs": [[1, 2, 3]] * 6})
        assert answer.status_code == 400
        assert "takes 5 at once" in answer.json()["error"]
        assert http.post("/v1/models/twice/predict", json={"inputs": [[1, 2, 3]] * 5}).status_code == 200


def test_samples_of_a_client_that_hung_up_are_no_longer_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = change_artifact(write_artifact(tmp_path / "slow.laconic", seconds=0.05), knee=8)
    with running(path, threads=1) as server:
        model = server.app.repository.get("slow")
        encoded = 0
        encode = model.task.encode

        def count(samples: list[object]) -> object:
            nonlocal encoded
            encoded += 1
            return encode(samples)

        monkeypatch.setattr(model.task, "encode", count)
        body = httpx.Request("POST", "http://x", json={"inputs": [[1, 2, 3]] * 2000}).read()
        head = f"POST /v1/models/slow/predict HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + body)
            assert eventually(lambda: encoded > 0)
        assert eventually(lambda: model.batcher.pending == 0)
        assert encoded < 200
        assert eventually(lambda: model.batcher._queue.rows_ahead(10**6) == 0)
