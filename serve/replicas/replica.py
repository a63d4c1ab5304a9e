"""A replica: the whole server of one model, as Ray runs it, behind Ray's HTTP."""

import re
from collections.abc import Mapping

from serve.asgi.wire import Receive, Scope, Send
from serve.http.app import App, create_app
from serve.http.prometheus import Metrics
from serve.model_repository.artifact_sources import locate_artifact
from serve.protocol.metadata import check_server
from serve.settings.server_settings import Settings

GATHER_SECONDS = 5.0
"""How long a scrape waits for the metrics of the other replicas."""
SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
"""A sample of a metric: its name, labels and value."""


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


class GatheredMetrics(Metrics):
    """The metrics of all replicas of a model, each with a label `replica`, whichever of them is asked."""

    async def gather(self) -> bytes:
        from ray import serve as ray_serve

        context = ray_serve.get_replica_context()
        handle = ray_serve.get_deployment_handle(context.deployment, context.app_name)
        answers = await handle.broadcast("read_metrics").results_async(timeout_s=GATHER_SECONDS, return_exceptions=True)
        texts = dict(answer for answer in answers if not isinstance(answer, BaseException))
        return merge_metrics(texts | {context.replica_tag: self.text().decode()}).encode()


def find_replica_name() -> str:
    """Return the name that Ray gave this replica."""
    from ray import serve as ray_serve

    return str(ray_serve.get_replica_context().replica_tag)


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge metrics in Prometheus' text format into one text. texts: by the names of replicas, which become labels."""
    families: dict[str, dict[str, None]] = {}  # the lines of each metric, in order and each once
    for replica, text in sorted(texts.items()):
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
            else:
                line = add_label(line, replica)
            families.setdefault(family, {})[line] = None
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def add_label(sample: str, replica: str) -> str:
    """Add the label of a replica to a sample."""
    match = SAMPLE.fullmatch(sample)
    assert match is not None, sample
    name, labels, value = match.groups()
    return f'{name}{{replica="{replica}"{f",{labels}" if labels else ""}}} {value}'
