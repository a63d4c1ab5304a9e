"""The whole server as one ASGI application: the hot path in front, FastAPI behind it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fastapi import FastAPI

from laconic.errors import UsageError
from serve.asgi.error_boundary import ErrorBoundary
from serve.asgi.wire import Headers, Receive, Scope, Send
from serve.http.control import create_control
from serve.http.embed import Embed
from serve.http.endpoint import Endpoint
from serve.http.extension_routes import add_extensions
from serve.http.generate import ChatCompletions, Completions
from serve.http.generate_extension import Generate, GenerateStream
from serve.http.guard import Guard
from serve.http.infer import Infer
from serve.http.prometheus import Metrics
from serve.http.rerank import Rerank
from serve.http.task_endpoint import Predict
from serve.http.transcribe import Transcribe
from serve.model_repository.adapter_folder import open_folders
from serve.model_repository.artifact_sources import locate_artifacts
from serve.model_repository.loader import open_models
from serve.model_repository.repository import Repository
from serve.model_repository.watched_folder import WatchedFolder
from serve.observation.observer import RequestObserver
from serve.requests.memory_budget import MemoryBudget
from serve.security.access import Access
from serve.settings.server_settings import Settings

ENDPOINTS = (Infer, Predict, Embed, Rerank, Transcribe, ChatCompletions, Completions, Generate, GenerateStream)
"""What bypasses FastAPI."""
MetricsFactory = Callable[[Repository, Access], Metrics]


class App:
    """An ASGI application that serves the models of a repository. On shutdown it closes them.

    folders: where models and adapters come and go. metrics: makes what /metrics answers with. stopping: another server
    of the same models, while it stops.
    """

    def __init__(
        self,
        repository: Repository,
        settings: Settings,
        access: Access,
        observer: RequestObserver,
        folders: Sequence[WatchedFolder] = (),
        metrics: MetricsFactory = Metrics,
    ) -> None:
        self.repository = repository
        self.folders = folders
        self.access = access
        self.guard = Guard(access)
        self.observer = observer
        self.metrics = metrics(repository, access)
        self.settings = settings
        self.budget = MemoryBudget(settings.max_in_flight)
        self.stopping: asyncio.Task[None] | None = None
        self.control = self.create_control()
        self._endpoints = self.create_endpoints()

    def create_control(self) -> FastAPI:
        """Create what answers requests that no endpoint takes."""
        control = create_control(self.repository, self.metrics, self.close)
        add_extensions(control, self.repository, self.folders, self.settings)
        return control

    def create_endpoints(self) -> Sequence[Endpoint]:
        """Create what bypasses FastAPI."""
        return [kind(self.repository, self.settings, self.budget) for kind in ENDPOINTS]

    async def close(self) -> None:
        """Close the models, after what else answers requests with them."""
        try:
            if self.stopping is not None:
                await self.stopping
        finally:
            for folder in self.folders:
                folder.close()
            self.repository.close()
            self.observer.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or follow the lifespan."""
        if scope["type"] != "http":
            await self.control(scope, receive, send)
            return
        headers = dict(scope["headers"])
        exchange = self.observer.follow(scope, headers, send)
        if exchange is None:
            await self._respond(scope, headers, receive, send)
            return
        try:
            await self._respond(scope, headers, receive, exchange)
        finally:
            exchange.end()

    async def _respond(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        send, refusal = self.guard.admit(scope, headers, send)
        if refusal is not None:
            await refusal.send(send)
            return
        for endpoint in self._endpoints:
            if await endpoint(scope, receive, send):
                return
        if scope["method"] == "HEAD":  # of its answer, the connection sends the headers alone
            scope = {**scope, "method": "GET"}
        await ErrorBoundary(self.control, send).run(scope, receive)


def create_app(
    artifacts: Sequence[Path | str] | Mapping[str, Path],
    settings: Settings | None = None,
    metrics: MetricsFactory = Metrics,
) -> App:
    """Open the artifacts, those in the settings' folder of models, and their adapters, and put them behind HTTP.

    artifacts: as of `locate_artifacts`, or what it returns. metrics: as of App. Raises UsageError where
    there is neither, and what `locate_artifacts`, `Artifact.load`, `Artifact.open` and `Artifact.require_proof` raise,
    before anything is served.
    """
    settings = settings or Settings()
    if not artifacts and settings.models is None:
        raise UsageError("no artifact and no folder of models (--models) was given: there is nothing to serve")
    paths = artifacts if isinstance(artifacts, Mapping) else locate_artifacts(artifacts, settings)
    access, observer = Access(settings), RequestObserver(settings)
    repository = Repository(open_models(paths, settings), settings.require)
    folders: list[WatchedFolder] = []
    try:
        for folder in open_folders(repository, settings):
            folder.start()
            folders.append(folder)
    except BaseException:
        for folder in folders:
            folder.close()
        repository.close()
        raise
    return App(repository, settings, access, observer, folders, metrics)
