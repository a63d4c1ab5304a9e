"""`laconic serve --on ray`: models as deployments of Ray Serve, with HAProxy in front."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from laconic.artifacts.download import is_address
from laconic.clusters.ray_cluster import LOCAL, connect_ray, find_address, set_environment
from laconic.errors import RuntimeFailure, UsageError
from serve.asgi.listener import bind
from serve.model_repository.artifact_sources import NAMED, locate_artifact, name_sources
from serve.model_repository.loader import load_newest
from serve.replicas.replica import Replica
from serve.security.origin import is_loopback
from serve.settings.server_settings import Settings
from serve.settings.settings_file import load_settings

NOT_HERE = ("fronts", "grpc_port", "admin", "tls_cert", "tls_key", "models")
"""Settings of the server's own listeners and of its folder, which replicas do not have."""
ENVIRONMENT = {
    # Ray's own proxy answered 150 requests a second, HAProxy 1,300 to 1,600 (2 cores of an AMD EPYC).
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # Inference has no side effects: what a replica dropped is sent to another one.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
"""Environment variables for Ray Serve, of the driver and of a cluster on this machine."""
PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
"""The variables for HAProxy's other ports, which two clusters on one machine would share."""
DRAIN = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
"""The variable for the seconds that a replica still answers after it is told to stop."""
METRICS_SECONDS = 1.0
"""Time between two reports of a replica's requests in flight."""
LOOK_SECONDS = 0.2
"""Time between two looks at applications that are being deployed."""


class ReplicaArguments(Settings):
    """The settings of one model's replicas, and its artifact: a folder or an address, alone or as `NAME=ARTIFACT`."""

    artifact: str


def build(arguments: ReplicaArguments) -> Any:
    """Build the application of one model, for a configuration file of Ray Serve.

    The file names it as `serve.replicas.ray_server:build`. Raises UsageError.
    """
    values = {name: getattr(arguments, name) for name in arguments.model_fields_set - {"artifact"}}
    settings = Settings.model_validate(values)
    check_settings(settings)
    ((name, source),) = name_sources([arguments.artifact], settings).items()
    return make_application(name, source, settings)


def serve_on_ray(
    artifacts: Sequence[Path | str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Path | None = None,
    **options: Any,
) -> None:
    """Serve on a Ray cluster until a signal stops it, each model as a deployment of its own.

    The arguments are those of `serve.server.serve`. Raises UsageError also for a cluster that cannot be reached, and
    RuntimeFailure for a model that cannot be deployed.
    """
    limits = load_settings(options, os.environ, settings)
    check_settings(limits)
    if is_loopback(host) and not limits.allowed_hosts:
        limits = limits.model_copy(update={"allowed_hosts": (host,)})
    sources = {name: find_source(source) for name, source in name_sources(artifacts, limits).items()}
    if not sources:
        raise UsageError("no artifact was given: there is nothing to serve")
    routes = make_routes(sources)
    is_local = find_address(limits.ray_address) == LOCAL
    if is_local:  # what cannot be served is said before a cluster is started
        for name, source in sources.items():
            load_newest(locate_artifact(name, source, limits))
        port = find_port(host, port)
        set_environment({name: str(find_port(host, 0)) for name in PORTS})
    cpus = sum(count_cpus(name, limits) for name in sources) * (limits.max_replicas or limits.replicas)
    set_environment(ENVIRONMENT | {DRAIN: f"{limits.drain:g}"})
    from ray import serve as ray_serve

    with connect_ray(cpus, limits.ray_address):
        RayServer(ray_serve, host, port, limits).run(sources, routes)


class RayServer:
    """The applications of models on a cluster, as long as the command runs. ray_serve: the module of Ray Serve."""

    def __init__(self, ray_serve: Any, host: str, port: int, settings: Settings) -> None:
        self.ray_serve = ray_serve
        self.host = host
        self.port = port
        self.settings = settings
        self._stopping = threading.Event()

    def run(self, sources: Mapping[str, str], routes: Mapping[str, str]) -> None:
        """Deploy the models, and delete them when a signal comes, after the requests that are in flight.

        sources, routes: folders or addresses of artifacts and prefixes of paths, by the names of models.
        """
        ray_serve = self.ray_serve
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            ray_serve.start(http_options={"host": self.host, "port": self.port})
        except RuntimeError as error:
            raise RuntimeFailure(f"Ray Serve cannot start: {find_reason(error)}") from error
        targets = [
            ray_serve.RunTarget(
                target=make_application(name, source, self.settings), name=name, route_prefix=routes[name]
            )
            for name, source in sources.items()
        ]
        try:
            ray_serve.run_many(targets, wait_for_applications_running=False)
            self._wait_until_running(sources)
            if not self._stopping.is_set():
                sys.stdout.write(f"{self._format_welcome(routes)}\n")
                sys.stdout.flush()
            self._stopping.wait()
        finally:
            for name in sources:
                with suppress(ray_serve.exceptions.RayServeException):
                    ray_serve.delete(name, _blocking=name == list(sources)[-1])

    def _stop(self, sig: int, frame: FrameType | None) -> None:
        self._stopping.set()

    def _wait_until_running(self, names: Mapping[str, str]) -> None:
        """Wait until every model has replicas that answer. Raises RuntimeFailure for one that cannot be deployed."""
        waiting = set(names)
        while waiting and not self._stopping.wait(LOOK_SECONDS):
            applications = self.ray_serve.status().applications
            for name in sorted(waiting):
                status = applications[name].status
                if status == "DEPLOY_FAILED":
                    reason = find_reason(applications[name].message)
                    raise RuntimeFailure(f"model {name!r} cannot be deployed on the cluster: {reason}")
                if status == "RUNNING":
                    waiting.discard(name)

    def _format_welcome(self, routes: Mapping[str, str]) -> str:
        """Format the line for a ready server: its address, and the path of each model."""
        url = f"http://{self.host}:{self.port}"
        places = ", ".join(f"{name} at {url}{route.rstrip('/')}" for name, route in routes.items())
        return f"Serving {places}, by {format_count(self.settings)}"


def find_reason(failure: object) -> str:
    """Return the last line of what Ray says of a failure; what stands before it is a traceback."""
    return (str(failure).strip() or type(failure).__name__).splitlines()[-1]


def check_settings(settings: Settings) -> None:
    """Raise UsageError for settings that replicas cannot follow, or that contradict one another."""
    for name in NOT_HERE:
        if getattr(settings, name) != Settings.model_fields[name].default:
            raise UsageError(
                f"{name} does not go with Ray: its HTTP proxy listens, and each model is a deployment of its own"
            )
    if settings.max_replicas is not None and settings.max_replicas < settings.replicas:
        raise UsageError(f"at most {settings.max_replicas} replicas are fewer than at least {settings.replicas}")


def find_source(source: str) -> str:
    """Return the source of an artifact as a replica finds it, which has another working folder."""
    return source if is_address(source) else str(Path(source).absolute())


def find_port(host: str, port: int) -> int:
    """Return a port that can be bound, a free one for 0. Raises UsageError."""
    with bind(host, port) as listener:
        return int(listener.getsockname()[1])


def make_routes(names: Mapping[str, str]) -> dict[str, str]:
    """Return the prefix of the paths of each model: none for the only one. Raises UsageError for a name that cannot
    be one."""
    if len(names) == 1:
        return dict.fromkeys(names, "/")
    for name in names:
        if not NAMED.fullmatch(f"{name}=ARTIFACT"):
            raise UsageError(f"{name!r} cannot be a part of a path. Give the artifact as NAME=ARTIFACT")
    return {name: f"/{name}" for name in names}


def count_cpus(name: str, settings: Settings) -> int:
    """Return the cores of each replica of a model: one, unless it is told otherwise."""
    return (settings.shares or {}).get(name) or settings.threads or 1


def make_application(name: str, source: str, settings: Settings) -> Any:
    """Make the application of one model for Ray Serve."""
    from ray import serve as ray_serve

    cpus = count_cpus(name, settings)
    digest = settings.find_digest(name)
    settings = settings.model_copy(
        update={"threads": cpus, "shares": None, "require": (name,), "sha256": {name: digest} if digest else None}
    )
    options: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        options = {
            "autoscaling_config": {
                "min_replicas": settings.replicas,
                "max_replicas": settings.max_replicas,
                "target_ongoing_requests": settings.target_ongoing,
                "upscale_delay_s": settings.scale_up_after,
                "downscale_delay_s": settings.scale_down_after,
                "metrics_interval_s": METRICS_SECONDS,
                "look_back_period_s": max(METRICS_SECONDS, settings.scale_up_after),
            }
        }
    deployment = ray_serve.deployment(ray_serve.ingress()(Replica)).options(
        name=name,
        max_ongoing_requests=settings.max_connections,  # the batcher refuses what would wait too long, with 429
        ray_actor_options={"num_cpus": cpus, "num_gpus": settings.replica_gpus},
        graceful_shutdown_timeout_s=settings.grace,
        **options,
    )
    return deployment.bind(name, source, settings)


def format_count(settings: Settings) -> str:
    """Format how many replicas there are."""
    if settings.max_replicas is not None:
        return f"{settings.replicas} to {settings.max_replicas} replicas each"
    return f"{settings.replicas} replica{'s' if settings.replicas > 1 else ''} each"
