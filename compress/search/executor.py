"""Where candidates are worked on: in this process, or on the machines of a Ray cluster. The work is the same."""

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

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Ray reports its use to its makers unless it is told not to."""


class Executor(ABC):
    """Does pieces of work that do not depend on one another."""

    @abstractmethod
    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Iterator[R]:
        """What the function makes of each, in their order."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many pieces are under way at the same time."""


class Local(Executor):
    """One after the other, in this process."""

    workers = 1

    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Iterator[R]:
        return map(function, jobs)


class Cluster(Executor):
    """The machines of a Ray cluster; a piece of work takes `threads` cores. They need the same files at the same
    places, the cache among them: each piece is found there by whoever needs it next."""

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
def local(threads: int) -> Iterator[Executor]:
    """This process."""
    yield Local()


@contextmanager
def ray(threads: int) -> Iterator[Executor]:
    """The cluster that RAY_ADDRESS names; without it, one on this machine that ends with the work."""
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    try:
        import ray as engine
    except ModuleNotFoundError as error:
        raise registry.missing_package("ray") from error
    address = os.environ.get("RAY_ADDRESS") or "local"
    paths = os.pathsep.join(path for path in sys.path if path)
    own = not engine.is_initialized()
    if own:
        try:
            engine.init(
                address,
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
        yield Cluster(engine, threads)
    finally:
        if own:
            engine.shutdown()


ENGINES = {"local": local, "ray": ray}


@contextmanager
def executor(engine: str, threads: int) -> Iterator[Executor]:
    """The executor of this name, closed behind the body. threads: cores that a piece of work takes.

    Raises UsageError for one that is not known, MissingPackage where Ray is not installed.
    """
    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}. {registry.did_you_mean(engine, ENGINES)}")
    with ENGINES[engine](threads) as made:
        yield made
