"""The routes of extensions of the V2 protocol: control of the model repository, settings, shared memory."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from laconic.errors import InputError
from serve.asgi.body import parse, read_body
from serve.asgi.wire import ClientGone
from serve.model_repository.repository import Repository
from serve.model_repository.watched_folder import WatchedFolder
from serve.protocol import extensions
from serve.requests.memory_budget import MemoryBudget, Reservation
from serve.settings.server_settings import Settings

MAX_BODY = 1 << 16
"""Bytes of the JSON that these routes take."""
SHARED_MEMORY = ("systemsharedmemory", "cudasharedmemory")
SETTINGS_BODY = {
    "requestBody": {"required": False, "content": {"application/json": {"schema": {"type": "object"}}}},
}


def add_extensions(app: FastAPI, repository: Repository, folders: Sequence[WatchedFolder], settings: Settings) -> None:
    """Add the routes. folders: where models are loaded from; without any, the routes that load them say so."""
    add_model_control(app, folders, settings)
    add_settings(app, repository)
    for kind in SHARED_MEMORY:
        add_shared_memory(app, kind)


def add_model_control(app: FastAPI, folders: Sequence[WatchedFolder], settings: Settings) -> None:
    """Add the routes that load and unload models."""

    @app.post("/v2/repository/models/{name}/load", tags=["server"], response_class=Response)
    async def load(name: str, request: Request) -> Response:
        """Load the newest version of a model in the folder. Answers when it is served."""
        await extensions.control_model(folders, settings, WatchedFolder.load, name, await read_control_body(request))
        return Response()

    @app.post("/v2/repository/models/{name}/unload", tags=["server"], response_class=Response)
    async def unload(name: str, request: Request) -> Response:
        """Serve a model no longer. Requests under way are answered."""
        await extensions.control_model(folders, settings, WatchedFolder.unload, name, await read_control_body(request))
        return Response()


def add_settings(app: FastAPI, repository: Repository) -> None:
    """Add the trace settings of the server and of each model, and the log settings."""

    @app.get("/v2/logging", tags=["extensions"])
    async def log_settings() -> dict[str, Any]:
        """Return the settings of the log."""
        return extensions.LOG_SETTINGS

    @app.post("/v2/logging", tags=["extensions"], openapi_extra=SETTINGS_BODY)
    async def set_log(request: Request) -> dict[str, Any]:
        """Refuse changes of the log's settings."""
        return extensions.keep_settings(extensions.LOG_SETTINGS, await read_control_body(request), "logging")

    @app.get("/v2/trace/setting", tags=["extensions"])
    async def trace_settings() -> dict[str, Any]:
        """Return the settings of tracing, which is off."""
        return extensions.TRACE_SETTINGS

    @app.post("/v2/trace/setting", tags=["extensions"], openapi_extra=SETTINGS_BODY)
    async def set_trace(request: Request) -> dict[str, Any]:
        """Refuse changes of the settings of tracing."""
        return extensions.keep_settings(extensions.TRACE_SETTINGS, await read_control_body(request), "tracing")

    @app.get("/v2/models/{name}/trace/setting", tags=["extensions"])
    async def trace_settings_of_model(name: str) -> dict[str, Any]:
        """Return the settings of tracing for one model."""
        repository.get(name)
        return extensions.TRACE_SETTINGS

    @app.post("/v2/models/{name}/trace/setting", tags=["extensions"], openapi_extra=SETTINGS_BODY)
    async def set_trace_of_model(name: str, request: Request) -> dict[str, Any]:
        """Refuse changes of the settings of tracing for one model."""
        repository.get(name)
        return await set_trace(request)


def add_shared_memory(app: FastAPI, kind: str) -> None:
    """Add the routes of one kind of shared memory. Only its path differs from that of the other."""

    async def status() -> list[Any]:
        """List the regions that are registered: none."""
        return []

    async def region_status(region: str) -> list[Any]:
        """Refuse to describe a region: none is registered."""
        extensions.find_region(region)
        return []

    async def register(region: str) -> Response:
        """Refuse a region: this server reads no shared memory."""
        extensions.refuse_region(region)
        return Response()

    async def unregister() -> Response:
        """Leave no region, as before."""
        return Response()

    async def unregister_region(region: str) -> Response:
        """Leave no region of that name, as before."""
        return Response()

    for path, answer, method in (
        ("status", status, "GET"),
        ("region/{region}/status", region_status, "GET"),
        ("region/{region}/register", register, "POST"),
        ("unregister", unregister, "POST"),
        ("region/{region}/unregister", unregister_region, "POST"),
    ):
        app.add_api_route(
            f"/v2/{kind}/{path}",
            answer,
            methods=[method],
            tags=["extensions"],
            name=f"{kind}_{answer.__name__}",
            response_class=JSONResponse if method == "GET" else Response,
            response_model=None,
        )


async def read_control_body(request: Request) -> Any:
    """Read what the JSON in the body holds; an empty object where there is no body. Raises InputError."""
    budget = MemoryBudget(2 * MAX_BODY)
    try:
        body = await read_body(dict(request.scope["headers"]), request.receive, MAX_BODY, Reservation(budget))
    except ClientGone:
        raise InputError("the client left") from None
    return parse(body) if body else {}
