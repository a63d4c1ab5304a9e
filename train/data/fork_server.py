"""The server that worker processes are forked from; started without a wait for torch, which it imports meanwhile."""

import multiprocessing
import multiprocessing.forkserver
import sys

START = "forkserver" if sys.platform == "linux" else "spawn"
"""The start method of workers. A fork of this process would lose its threads (OpenMP's, autograd's, NCCL's) and keep
the locks that they held. The fork server has torch loaded, and no threads."""


def preload_workers(module: str, workers: int) -> None:
    """Let the server that worker processes are forked from import a module, while this process does other things.

    workers: most processes that will work, this one included; nothing is done for one.
    """
    if workers > 1 and START == "forkserver":
        multiprocessing.get_context(START).set_forkserver_preload([module])
        multiprocessing.forkserver.ensure_running()
