"""The routes that load and unload the models of the watched folder, as Triton's model repository extension has them."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response

from laconic.errors import UsageError
from serve.http.control_body import read_control_body
from serve.model_repository.watched_folder import WatchedFolder
from serve.settings.server_settings import Settings


def add_model_control(app: FastAPI, folder: WatchedFolder | None, settings: Settings) -> None:
    """Add the routes. folder: where the models lie; without one, the routes say so."""

    @app.post("/v2/repository/models/{name}/load", tags=["server"], response_class=Response)
    async def load(name: str, request: Request) -> Response:
        """Load the newest version of a model in the folder. Answers when it is served."""
        await control(folder, settings, WatchedFolder.load, name, await read_control_body(request))
        return Response()

    @app.post("/v2/repository/models/{name}/unload", tags=["server"], response_class=Response)
    async def unload(name: str, request: Request) -> Response:
        """Serve a model no longer. Requests under way are answered."""
        await control(folder, settings, WatchedFolder.unload, name, await read_control_body(request))
        return Response()


HARMLESS = {"unload_dependents"}
"""Parameters that change nothing, and that tritonclient sends: no model depends on another."""


async def control(
    folder: WatchedFolder | None,
    settings: Settings,
    act: Callable[[WatchedFolder, str], None],
    name: str,
    content: Any,
) -> None:
    """Act on a model. content: of the request.

    Raises UsageError without a folder, in one of several server processes, and for parameters: a request names no
    path and no file.
    """
    if folder is None:
        raise UsageError("this server watches no folder of models (--models), so its models stay as they are")
    if settings.fronts > 1:
        raise UsageError("one of several server processes (--fronts) answers here. Change the folder of models")
    parameters = content.get("parameters") or {} if isinstance(content, dict) else None
    if not isinstance(parameters, dict) or set(parameters) - HARMLESS:
        raise UsageError("a model is loaded and unloaded as it lies in the folder: 'parameters' are not supported")
    await asyncio.to_thread(act, folder, name)
