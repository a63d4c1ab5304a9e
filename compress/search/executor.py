"""Executors for trials: this process, or a Ray cluster. Both give the same results."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from laconic import registry
from laconic.errors import RuntimeFailure, UsageError

J = TypeVar("J")
R = TypeVar("R")

RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment variables for Ray. By default it sends usage statistics to its makers."""


class Executor(ABC):
    """Runs jobs that are independent of one another."""

    @abstractmethod
    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Iterator[R]:
        """The function's result for each job, in the order of the jobs."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """The number of jobs that run at the same time."""


class LocalExecutor(Executor):
    """Runs the jobs one after the other, in this process."""

    workers = 1

    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Iterator[R]:
        return map(function, jobs)


class RayExecutor(Executor):
    """Runs the jobs on a Ray cluster, each on `threads` cores.

    All machines need the same files at the same paths. The cache is one of them: a job leaves its result there.
    """

    def __init__(self, ray: Any, threads: int) -> None:
        self._ray = ray
        self._threads = threads

    @property
    def workers(self) -> int:
        return max(int(self._ray.cluster_resources().get("CPU", 1)) // self._threads, 1)

    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Iterator[R]:
        remote = self._ray.remote(num_cpus=self._threads, max_retries=1)(function)
        pending = [remote.remote(job) for job in jobs]
        for each in pending:
            try:
                yield self._ray.get(each)
            except self._ray.exceptions.RayError as error:
                raise RuntimeFailure(f"a worker of the cluster failed: {error}") from error


@contextmanager
def open_local(threads: int) -> Iterator[Executor]:
    """An executor in this process."""
    yield LocalExecutor()


@contextmanager
def open_ray(threads: int) -> Iterator[Executor]:
    """An executor on the cluster at RAY_ADDRESS; without it, on a cluster on this machine that is stopped on exit."""
    os.environ.update({name: os.environ.get(name, value) for name, value in RAY_ENVIRONMENT.items()})
    try:
        import ray
    except ModuleNotFoundError as error:
        raise registry.missing_package("ray") from error
    address = os.environ.get("RAY_ADDRESS") or "local"
    paths = os.pathsep.join(path for path in sys.path if path)
    own = not ray.is_initialized()
    if own:
        try:
            ray.init(
                address,
                num_cpus=threads if address == "local" else None,  # Ray would count all cores of the machine
                runtime_env={"env_vars": {"PYTHONPATH": paths}},
                include_dashboard=None if address != "local" else False,
                log_to_driver=False,
                logging_level="error",
            )
        except (ConnectionError, RuntimeError) as error:
            raise UsageError(
                f"there is no Ray cluster at {address}: {error}. Start one, or unset RAY_ADDRESS"
            ) from error
    try:
        yield RayExecutor(ray, threads)
    finally:
        if own:
            ray.shutdown()


EXECUTORS = {"local": open_local, "ray": open_ray}


@contextmanager
def open_executor(name: str, threads: int) -> Iterator[Executor]:
    """Open the executor of this name, closed on exit. threads: cores that a job takes.

    Raises UsageError for an unknown name, MissingPackage where Ray is not installed.
    """
    if name not in EXECUTORS:
        raise UsageError(f"unknown executor {name!r}. {registry.did_you_mean(name, EXECUTORS)}")
    with EXECUTORS[name](threads) as made:
        yield made
