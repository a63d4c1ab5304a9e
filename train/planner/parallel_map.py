"""A function over many items, in this process or spread over worker processes."""

import multiprocessing
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from train.data.batch_builder import exit_with_parent
from train.data.fork_server import START

WORTH = 4.0
"""Seconds of work that are worth forking processes for, from a server that has been started (`preload_workers`)."""
QUEUED = 2
"""Items for each worker process that wait or run: one that has ended has the next at once."""
WORK: list[Callable[[Any], Any]] = []
"""What this process calls on items, where it is a worker."""

T = TypeVar("T")
R = TypeVar("R")


def map_parallel(work: Callable[[T], R], items: Sequence[T], *, workers: int) -> Iterator[tuple[int, R]]:
    """Call `work` on each item; yields the items' indices with the results, in any order.

    workers: most processes, of which this is one. The others are started where the time of the calls so far says that
    it pays, and where `work` can be sent to another process; they begin with the items that come last in `items`, as
    the longest. With more than one, the main script must be importable, as multiprocessing requires.
    """
    begin = time.perf_counter()
    is_shared = workers > 1 and is_sendable(work)
    for index, item in enumerate(items):
        rest = len(items) - index
        if is_shared and rest > 1 and index and rest * (time.perf_counter() - begin) > index * WORTH:
            yield from map_in_pool(work, items, range(index, len(items)), workers - 1, joins=True)
            return
        yield index, work(item)


def is_sendable(work: Callable[[T], R]) -> bool:
    """Return whether a function, and what it is bound to, can be sent to another process."""
    try:
        pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def map_in_pool(
    work: Callable[[T], R], items: Sequence[T], indices: Sequence[int], workers: int, *, joins: bool = False
) -> Iterator[tuple[int, R]]:
    """Call `work` on the items of these indices in worker processes, from the last on; what they do not finish, because
    one of them died, is done here. joins: whether this process works meanwhile, from the first item on."""
    context = multiprocessing.get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload([work.__module__])
    workers = min(workers, len(indices))
    # Sent with each item, it would be pickled in a thread while this process works with what it is bound to.
    pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(work,))
    left, running = deque(indices), dict[Future[R], int]()
    try:
        while left or running:
            while left and len(running) < QUEUED * workers:
                running[pool.submit(do_work, items[left[-1]])] = left[-1]
                left.pop()
            if joins and left:
                index = left.popleft()
                yield index, work(items[index])
            for future in wait(running, 0 if joins and left else None, FIRST_COMPLETED).done:
                result = future.result()
                yield running.pop(future), result
    except BrokenProcessPool:
        yield from ((index, work(items[index])) for index in (*left, *running.values()))
    finally:
        # Workers without work end at once. Left to end by themselves they may never: a process that multiprocessing has
        # started closes the queue of calls at its end before the pool's thread has told the workers through it.
        pool.shutdown(wait=not running, cancel_futures=True)


def do_work(item: Any) -> Any:
    """Call the function of this worker process."""
    return WORK[-1](item)


def start_worker(work: Callable[[Any], Any]) -> None:
    """Set up a worker process: it ends with its parent, which also handles Ctrl-C."""
    WORK.append(work)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, name="laconic-exit-with-parent", daemon=True).start()
    torch.set_num_threads(1)
