"""`laconic serve --on ray`: models as deployments of Ray Serve, with HAProxy in front."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.artifacts.model_name import check_name, is_address
from laconic.clusters.ray_cluster import LOCAL, connect_ray, find_address, set_environment
from laconic.errors import UsageError
from serve.asgi.listener import bind
from serve.asgi.wire import Receive, Scope, Send
from serve.http.app import App, create_app
from serve.model_repository.artifact_sources import locate_artifact, name_sources
from serve.model_repository.loader import load_newest
from serve.protocol.metadata import check_server
from serve.replicas.ray_applications import RayApplications
from serve.replicas.replica_metrics import GatheredMetrics, find_replica_name
from serve.security.origin import is_loopback
from serve.settings.server_settings import RAY, Settings
from serve.settings.settings_file import PLACES, load_settings, refuse_settings_of_others

NOT_HERE = ("fronts", "grpc_port", "admin", "tls_cert", "tls_key", "models", "adapters")
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


class Replica:
    """What Ray makes an actor of. source: the folder or the address of the artifact, on the replica's machine."""

    def __init__(self, name: str, source: str, settings: Settings) -> None:
        self._app = create_app({name: locate_artifact(name, source, settings)}, settings, metrics=GatheredMetrics)

    def __serve_build_asgi_app__(self) -> "MountedApp":
        """Return the application that answers requests, as Ray asks for it."""
        return MountedApp(self._app)

    def check_health(self) -> None:
        """Raise NotReady while the model has no engine: after three failures Ray replaces the replica."""
        check_server(self._app.repository)

    def read_metrics(self) -> tuple[str, str]:
        """Return the name of the replica and its own metrics."""
        return find_replica_name(), self._app.metrics.text().decode()


class MountedApp:
    """An application whose paths begin behind a prefix, which Ray puts into a request's `root_path`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or follow the lifespan."""
        if prefix := scope.get("root_path", ""):
            scope = {**scope, "path": scope["path"].removeprefix(prefix) or "/", "root_path": ""}
        await self._app(scope, receive, send)


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
    refuse_settings_of_others(limits, PLACES[RAY])
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
            load_newest(locate_artifact(name, source, limits), limits)
        port = find_port(host, port)
        set_environment({name: str(find_port(host, 0)) for name in PORTS})
    cpus = sum(count_cpus(name, limits) for name in sources) * (limits.max_replicas or limits.replicas)
    set_environment(ENVIRONMENT | {DRAIN: f"{limits.drain:g}"})
    from ray import serve as ray_serve

    with connect_ray(cpus, limits.ray_address):
        applications = {name: make_application(name, source, limits) for name, source in sources.items()}
        RayApplications(ray_serve, host, port).run(applications, routes, format_count(limits))


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
        check_name(name)
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
