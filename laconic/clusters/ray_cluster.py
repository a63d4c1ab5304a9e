"""A connection to a Ray cluster. Ray is imported here and where its parts are used, and nowhere else."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from laconic import registry
from laconic.errors import UsageError

LOCAL = "local"
"""The address of a cluster on this machine that lives as long as the command. Without one Ray takes the address of
another cluster from a file that its last command left behind."""
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment variables for Ray. By default it sends usage statistics to its makers."""
REACH_SECONDS = 5.0
"""How long a machine of a cluster may take to be reached."""


def find_address(address: str | None = None) -> str:
    """Return the address of the cluster: the given one, RAY_ADDRESS, or LOCAL."""
    return address or os.environ.get("RAY_ADDRESS") or LOCAL


def set_environment(variables: Mapping[str, str]) -> None:
    """Set variables for Ray, before it is imported; those that are there stay."""
    for name, value in (ENVIRONMENT | dict(variables)).items():
        os.environ.setdefault(name, value)


def check_reachable(address: str) -> None:
    """Raise UsageError unless something listens at HOST:PORT, which Ray would try for two minutes."""
    place = urlsplit(address if "://" in address else f"//{address}")
    try:
        if place.hostname and place.port:
            socket.create_connection((place.hostname, place.port), REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        raise explain_absence(address, error) from None


def explain_absence(address: str, error: Exception) -> UsageError:
    """Make the error for a cluster that is not there."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return UsageError(f"there is no Ray cluster at {address}: {reason}. Start one, or unset RAY_ADDRESS")


@contextmanager
def connect_ray(cpus: int, address: str | None = None) -> Iterator[Any]:
    """Connect to the cluster at `find_address`; a local one is stopped on exit.

    cpus: what a local cluster counts as its cores; Ray would count all of the machine. Raises UsageError where there
    is no such cluster, MissingPackage without Ray.
    """
    set_environment({})
    try:
        import ray
    except ModuleNotFoundError as error:
        raise registry.missing_package("ray") from error
    if ray.is_initialized():
        yield ray
        return
    address = find_address(address)
    check_reachable(address)
    paths = os.pathsep.join(path for path in sys.path if path)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address,
            num_cpus=cpus if address == LOCAL else None,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
            include_dashboard=None if address != LOCAL else False,
            log_to_driver=False,
            logging_level="error",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise explain_absence(address, error) from error
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own aborts the process
    try:
        yield ray
    finally:
        ray.shutdown()
