"""A function over many items, in this process or spread over worker processes."""

import multiprocessing
import multiprocessing.forkserver
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch

from train.data.batch_builder import START, exit_with_parent

WORTH = 8.0
"""Seconds of work that are worth starting processes for: that takes about four without `preload_workers`."""

T = TypeVar("T")
R = TypeVar("R")


def map_parallel(work: Callable[[T], R], items: Sequence[T], *, workers: int) -> Iterator[tuple[int, R]]:
    """Call `work` on each item; yields the items' indices with the results, in any order.

    workers: most processes. They are started where the time of the first call says that it pays, and where `work` can
    be sent to another process; the items that come last in `items` go first, as the longest. With more than one, the
    main script must be importable, as multiprocessing requires.
    """
    begin = time.perf_counter()
    for index, item in enumerate(items):
        rest = len(items) - index
        if index == 1 and workers > 1 and rest * (time.perf_counter() - begin) > WORTH and is_sendable(work):
            yield from map_in_pool(work, items, range(len(items) - 1, 0, -1), workers)
            return
        yield index, work(item)


def preload_workers(module: str, workers: int) -> None:
    """Let the server that worker processes are forked from import a module, while this process does other things.

    workers: most processes, as of `map_parallel`; nothing is done for one.
    """
    if workers > 1 and START == "forkserver":
        multiprocessing.get_context(START).set_forkserver_preload([module])
        multiprocessing.forkserver.ensure_running()


def is_sendable(work: Callable[[T], R]) -> bool:
    """Return whether a function, and what it is bound to, can be sent to another process."""
    try:
        pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def map_in_pool(
    work: Callable[[T], R], items: Sequence[T], indices: Sequence[int], workers: int
) -> Iterator[tuple[int, R]]:
    """Call `work` on the items of these indices in worker processes; what they do not finish, because one of them
    died, is done here."""
    context = multiprocessing.get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload([work.__module__])
    pool = ProcessPoolExecutor(min(workers, len(indices)), context, initializer=start_worker)
    missing = list(indices)
    try:
        futures = {pool.submit(work, items[index]): index for index in indices}
        for future in as_completed(futures):
            result = future.result()
            missing.remove(futures[future])
            yield futures[future], result
    except BrokenProcessPool:
        yield from ((index, work(items[index])) for index in missing)
    finally:
        # Workers without work end at once. Left to end by themselves they may never: a process that multiprocessing has
        # started closes the queue of calls at its end before the pool's thread has told the workers through it.
        pool.shutdown(wait=not missing, cancel_futures=True)


def start_worker() -> None:
    """Set up a worker process: it ends with its parent, which also handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, name="laconic-exit-with-parent", daemon=True).start()
    torch.set_num_threads(1)
