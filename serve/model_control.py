"""The routes that load and unload the models of the watched folder, as Triton's model repository extension has them."""

import asyncio
from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from laconic.errors import UsageError
from serve.control_body import read_control_body
from serve.watched_folder import WatchedFolder


def add_model_control(app: FastAPI, folder: WatchedFolder | None) -> None:
    """Add the routes. folder: where the models lie; without one, the routes say so."""

    @app.post("/v2/repository/models/{name}/load", tags=["server"], response_class=Response)
    async def load(name: str, request: Request) -> Response:
        """Load the newest version of a model in the folder. Answers when it is served."""
        return await control(folder, WatchedFolder.load, name, request)

    @app.post("/v2/repository/models/{name}/unload", tags=["server"], response_class=Response)
    async def unload(name: str, request: Request) -> Response:
        """Serve a model no longer. Requests under way are answered."""
        return await control(folder, WatchedFolder.unload, name, request)


async def control(
    folder: WatchedFolder | None, act: Callable[[WatchedFolder, str], None], name: str, request: Request
) -> Response:
    """Act on a model. Raises UsageError without a folder, and for parameters: a request names no path and no file."""
    if folder is None:
        raise UsageError("this server watches no folder of models (--models), so its models stay as they are")
    content = await read_control_body(request)
    if not isinstance(content, dict) or content.get("parameters"):
        raise UsageError("a model is loaded and unloaded as it lies in the folder: 'parameters' are not supported")
    await asyncio.to_thread(act, folder, name)
    return Response()
