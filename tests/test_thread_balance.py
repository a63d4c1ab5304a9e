"""Threads of a training run are given up while other processes want the cores, and taken back."""

import hashlib
import os
import threading

import pytest
import torch

from train.callbacks import thread_balance
from train.callbacks.callback import StepReport
from train.callbacks.thread_balance import MUCH, ThreadBalance, balance_threads, compute_wait_share, read_thread_times

counted = pytest.mark.skipif(not read_thread_times(), reason="this system does not count how long threads wait")
STEP = StepReport(step=1, loss=1.0, lr=0.1, tokens=1, rows=1, seconds=0.1, waited=0.0)


@pytest.fixture
def balance(monkeypatch):
    """Of a run with eight threads; `torch.get_num_threads` gives those it has."""
    count = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: count.__setitem__(0, threads))
    return ThreadBalance()


def follow(balance, shares, seconds=2.0):
    """The number of threads after each share of waiting."""
    counts = []
    for share in shares:
        balance.adapt(share, seconds)
        counts.append(torch.get_num_threads())
    return counts


def test_threads_follow_the_share_of_the_cores_and_come_back_when_it_is_quiet(balance):
    assert follow(balance, [0.1, 0.5, 0.6, 0.9, 0.9]) == [8, 4, 2, 1, 1]
    assert follow(balance, [0.0] * 6) == [1, 2, 2, 4, 4, 8]


def test_a_try_of_more_threads_that_fails_is_made_again_later_each_time(balance):
    for looks in (2, 4, 8, 16, 30, 30):  # of two seconds
        balance.adapt(0.5, 2.0)
        assert follow(balance, [0.0] * looks) == [4] * (looks - 1) + [8]
    assert follow(balance, [0.0, 0.5, 0.0, 0.0]) == [8, 4, 4, 8]  # it did not fail, so the next is made soon


def test_moderate_waiting_changes_nothing_and_begins_the_quiet_anew(balance):
    assert follow(balance, [0.5, 0.0, 0.1, 0.0, 0.0]) == [4, 4, 4, 4, 8]


def test_a_step_reads_the_times_of_the_threads_now_and_then(balance, monkeypatch):
    now = [0.0]
    readings = iter([{"1": (10, 0)}, {"1": (20, 10), "2": (5, 99)}])
    monkeypatch.setattr(thread_balance.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(thread_balance, "read_thread_times", lambda: next(readings))
    balance = ThreadBalance()
    balance.step(STEP)
    assert torch.get_num_threads() == 8
    now[0] = 2.0
    balance.step(STEP)
    assert torch.get_num_threads() == 4  # the second thread is not in both readings


@counted
def test_threads_on_one_core_are_seen_to_wait_for_each_other():
    core, both, stop = min(os.sched_getaffinity(0)), threading.Barrier(3), threading.Event()

    def work():
        os.sched_setaffinity(0, {core})
        both.wait()
        while not stop.is_set():
            hashlib.sha256(bytes(10_000_000)).digest()  # without the interpreter's lock

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    names = [str(thread.native_id) for thread in threads]
    both.wait()
    try:
        before = {name: read_thread_times()[name] for name in names}
        after = before
        while sum(after[name][0] - before[name][0] for name in names) < 3e8:  # nanoseconds of work
            after = read_thread_times()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert compute_wait_share(before, after) > MUCH


@counted
@pytest.mark.parametrize(
    ("device", "techniques", "variable", "tasks", "follows"),
    [
        ("cpu", (), None, True, True),
        ("cpu", ("bf16",), None, True, True),
        ("cpu", ("compile",), None, True, False),  # which would compile anew
        ("cpu", (), "2", True, False),
        ("cpu", (), None, False, False),
        ("cuda", (), None, True, False),
    ],
)
def test_the_load_is_followed_where_the_number_of_threads_is_free(
    device, techniques, variable, tasks, follows, monkeypatch
):
    monkeypatch.delenv(thread_balance.VARIABLE)  # the suite gives it
    if variable:
        monkeypatch.setenv(thread_balance.VARIABLE, variable)
    if not tasks:
        monkeypatch.setattr(thread_balance, "THREADS", thread_balance.THREADS / "missing")
    with balance_threads(torch.device(device), techniques) as balances:
        assert len(balances) == follows


def test_the_process_has_its_threads_back_afterwards():
    before = torch.get_num_threads()
    with balance_threads(torch.device("cpu"), ()):
        torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before


def test_no_waiting_is_computed_without_time():
    assert compute_wait_share({}, {}) == 0
