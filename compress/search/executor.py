"""What all candidates of a search share, and executors for their trials: this process, or a Ray cluster, with the same
results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from laconic.cache import Cache
from laconic.clusters.ray_cluster import connect_ray
from laconic.errors import RuntimeFailure, UsageError, did_you_mean
from laconic.hashing import hash_of
from laconic.models.source import Source
from laconic.recipes.splits import SampleSplits

J = TypeVar("J")
R = TypeVar("R")

EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class SearchContext:
    """What all candidates of a search share.

    trust: whether recipes may name code by its address. threads: of torch, for the same result on every machine.
    """

    source: Source
    samples: SampleSplits
    trust: bool
    cache: Cache
    threads: int

    @property
    def key(self) -> str:
        """A digest of the source, the task and all samples."""
        parts = (self.samples.train, self.samples.calibrate, self.samples.choose, self.samples.judge)
        return hash_of(self.source.key, self.source.task.name, [part.fingerprint for part in parts])


class Executor(ABC):
    """Runs jobs that are independent of one another."""

    @abstractmethod
    def map(self, function: Callable[[SearchContext, J], R], jobs: Sequence[J]) -> Iterator[R]:
        """Yield the function's result for the context and each job, in the order of the jobs."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """The number of jobs that run at the same time."""


class LocalExecutor(Executor):
    """Runs the jobs one after the other, in this process."""

    workers = 1

    def __init__(self, context: SearchContext) -> None:
        self._context = context

    def map(self, function: Callable[[SearchContext, J], R], jobs: Sequence[J]) -> Iterator[R]:
        return (function(self._context, job) for job in jobs)


class RayWorker:
    """An actor of Ray, which opens the context once."""

    def __init__(self, reopen: Callable[[], SearchContext]) -> None:
        self._context = reopen()

    def run(self, function: Callable[[SearchContext, J], R], job: J) -> R:
        """Run one job."""
        return function(self._context, job)


class RayExecutor(Executor):
    """Runs the jobs on a Ray cluster, in as many actors as it has room for, each on `threads` cores.

    reopen: opens the context on another machine. All machines need the same files at the same paths. The cache is one
    of them: a job leaves its result there.
    """

    def __init__(self, ray: Any, reopen: Callable[[], SearchContext], threads: int) -> None:
        self._ray = ray
        self._reopen = reopen
        self._threads = threads
        self._actors: list[Any] = []

    @property
    def workers(self) -> int:
        return max(int(self._ray.cluster_resources().get("CPU", 1)) // self._threads, 1)

    def map(self, function: Callable[[SearchContext, J], R], jobs: Sequence[J]) -> Iterator[R]:
        actor = self._ray.remote(num_cpus=self._threads, max_restarts=1, max_task_retries=1)(RayWorker)
        self._actors += [actor.remote(self._reopen) for _ in range(min(self.workers, len(jobs)) - len(self._actors))]
        pending = [self._actors[place % len(self._actors)].run.remote(function, job) for place, job in enumerate(jobs)]
        for result in pending:
            try:
                yield self._ray.get(result)
            except self._ray.exceptions.RayError as error:
                raise RuntimeFailure(f"a worker of the cluster failed: {error}") from error


@contextmanager
def open_executor(
    name: str, threads: int, context: SearchContext, reopen: Callable[[], SearchContext]
) -> Iterator[Executor]:
    """Open the executor of this name, closed on exit. threads: cores that a job takes.

    context: what all jobs share. reopen: opens it in another process, and is pickled. Raises UsageError for an unknown
    name, MissingPackage where Ray is not installed.
    """
    if name not in EXECUTORS:
        raise UsageError(f"unknown executor {name!r}. {did_you_mean(name, EXECUTORS)}")
    if name == "local":
        yield LocalExecutor(context)
    else:
        with connect_ray(threads) as ray:
            yield RayExecutor(ray, reopen, threads)
