"""Going on from a snapshot takes no more memory than the steps after it."""

import ctypes
import gc
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from rank_processes import by_two_ranks
from test_tensor_parallel import CPU, MODELS, NextToken, begin, learn, llama, make_rows

from train.parallel.mesh import Mesh
from train.parallel.ranks import Ranks, open_ranks
from train.run_snapshot import resume, save_snapshot
from train.snapshots.snapshot import Snapshots

MESH = {"shard": 2}
MMAP_THRESHOLD = -3
"""A parameter of glibc's `mallopt`."""
WIDE = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}


def begin_wide(rank):
    MODELS["wide"] = (lambda: llama(**WIDE), NextToken)
    ranks = Ranks.of(rank, 2, CPU, Mesh(**MESH))
    return begin("wide", MESH, (), ranks), ranks


def save(rank, folder):
    with open_ranks(CPU, Mesh()), Snapshots(folder / "snapshots") as snapshots:
        state, ranks = begin_wide(rank)
        losses = []
        learn(state, ranks, losses, [], 1)
        save_snapshot(snapshots, state, losses, wait=True)


def read_status(name):
    """Return a figure of this process's memory, in KiB."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def return_freed_memory():
    """Let each allocation above 64 KiB go back to the system when it is freed. What glibc keeps otherwise differs from
    run to run by three times the weights."""
    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16) == 1


def measure_peak(function):
    """Return the KiB at the peak of a call."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    function()
    return read_status("VmHWM")


def go_on(rank, folder):
    torch.set_num_threads(1)
    return_freed_memory()
    with open_ranks(CPU, Mesh()), Snapshots(folder / "snapshots") as snapshots:
        state, ranks = begin_wide(rank)
        held = sum(weight.to_local().nbytes for weight in state.module.parameters()) // 1024
        batch, losses = make_rows(0, ranks.data_rank, ranks.data_world), []
        before = read_status("VmRSS")
        resumed = measure_peak(lambda: losses.extend(resume(state, snapshots, batch)))
        stepped = measure_peak(lambda: learn(state, ranks, losses, [], 2))
    (folder / f"{rank}.json").write_text(json.dumps([held, resumed - before, stepped - before, len(losses)]))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_the_peak_of_going_on_is_no_higher_than_that_of_a_step(tmp_path, monkeypatch):
    assert by_two_ranks(save, tmp_path, monkeypatch) == [0, 0]
    assert by_two_ranks(go_on, tmp_path, monkeypatch) == [0, 0]
    for rank in range(2):
        held, resumed, stepped, steps = json.loads((tmp_path / f"{rank}.json").read_text())
        assert steps == 2
        assert stepped > 2 * held, "the optimizer has two moments of each weight"
        assert resumed <= stepped, (held, resumed, stepped)
