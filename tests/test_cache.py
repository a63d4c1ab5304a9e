"""Results by key: whole or not there, and what a kill leaves behind goes."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from laconic.cache import Cache


def fill_for_ever(folder, begun):
    """Fill an entry and never come to its end."""

    def fill(path):
        (path / "half").write_bytes(b"half")
        begun.set()
        time.sleep(600)

    cache = Cache(folder)
    with cache.lock("entry"):
        cache.directory("entry", fill)


def test_what_a_killed_process_left_half_filled_is_removed_by_the_next(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    process = spawn.Process(target=fill_for_ever, args=(tmp_path, begun))
    process.start()
    assert begun.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(list(tmp_path.glob("entry.*/half"))) == 1

    cache = Cache(tmp_path)
    with cache.lock("entry"):
        found = cache.directory("entry", lambda path: (path / "whole").write_bytes(b"whole"))
    assert [path.name for path in found.iterdir()] == ["whole"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entry", "entry.lock"]


def test_a_folder_whose_filling_fails_is_not_there_and_an_entry_is_computed_once_unless_it_is_damaged(tmp_path):
    def fill(path):
        (path / "half").write_bytes(b"half")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        Cache(tmp_path).directory("entry", fill)
    assert list(tmp_path.iterdir()) == []
    asked = []
    cache = Cache(tmp_path)

    def compute():
        asked.append(1)
        return {"a": [1, 2]}

    assert cache.json("entry", compute) == cache.json("entry", compute) == {"a": [1, 2]}
    assert len(asked) == 1
    (tmp_path / "entry.json").write_text('{"a": [1')
    assert cache.json("entry", compute) == {"a": [1, 2]}
    assert len(asked) == 2


def test_of_two_processes_that_fill_an_entry_both_get_a_whole_one_and_arrays_keep_their_order(tmp_path):
    cache = Cache(tmp_path)

    def fill(path):
        (path / "mine").touch()
        Cache(tmp_path).directory("entry", lambda other: (other / "theirs").touch())

    found = cache.directory("entry", fill)
    assert [path.name for path in found.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]
    given = {"logits": np.zeros((2, 3), np.float32), "boxes": np.ones(4, np.float64), "a": np.ones(1, np.int8)}
    cache = Cache(tmp_path)
    cache.arrays("key", lambda: given)
    found = cache.arrays("key", lambda: {})
    assert list(found) == list(given)
    assert all(np.array_equal(found[name], array) for name, array in given.items())
