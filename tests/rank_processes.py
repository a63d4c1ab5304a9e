"""Ranks of a test, each in a process of its own, forked from one that has imported what they need."""

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import socket
import sys
from functools import cache

SECONDS, GRACE = 200, 60
"""For all ranks, and for one when another is done."""
FAMILIES = ("llama", "gpt2", "bert")
IMPORTED = ["test_tensor_parallel", *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES)]
"""What most ranks need. Each would import it anew, which takes a rank some ten seconds of processor time."""


@cache
def open_server():
    """Return the process that ranks are forked from, started by the first of them.

    The one of the standard library is shared with the loader of batches, and imports what the first who asks wants.
    """
    server = multiprocessing.forkserver.ForkServer()
    server.set_forkserver_preload(IMPORTED)
    return server


def as_rank(scene, rank, world, port, folder):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    scene(rank, folder)


def by_two_ranks(scene, folder, monkeypatch, world=2):
    """Let two processes do it, or more; gives their exit codes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=as_rank, args=(scene, rank, world, port, folder)) for rank in range(world)]
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.forkserver, "connect_to_new_process", open_server().connect_to_new_process)
        for process in processes:
            process.start()
    multiprocessing.connection.wait([process.sentinel for process in processes], SECONDS)
    for process in processes:
        process.join(GRACE)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]
