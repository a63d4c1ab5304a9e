"""The routes that load and unload the models of the watched folder, as Triton's model repository extension has them."""

import asyncio

from fastapi import FastAPI, Request, Response

from laconic.errors import UsageError
from serve.control_body import read_control_body
from serve.server_settings import Settings
from serve.watched_folder import WatchedFolder


def add_model_control(app: FastAPI, folder: WatchedFolder | None, settings: Settings) -> None:
    """Add the routes. folder: where the models lie; without one, the routes say so."""

    @app.post("/v2/repository/models/{name}/load", tags=["server"], response_class=Response)
    async def load(name: str, request: Request) -> Response:
        """Load the newest version of a model in the folder. Answers when it is served."""
        await check(request)
        await asyncio.to_thread(choose_folder().load, name)
        return Response()

    @app.post("/v2/repository/models/{name}/unload", tags=["server"], response_class=Response)
    async def unload(name: str, request: Request) -> Response:
        """Serve a model no longer. Requests under way are answered."""
        await check(request)
        await asyncio.to_thread(choose_folder().unload, name)
        return Response()

    def choose_folder() -> WatchedFolder:
        if folder is None:
            raise UsageError("this server watches no folder of models (--models), so its models stay as they are")
        if settings.fronts > 1:
            raise UsageError("one of several server processes (--fronts) answers here. Change the folder of models")
        return folder


async def check(request: Request) -> None:
    """Raise UsageError for parameters: a request names no path and no file."""
    content = await read_control_body(request)
    if not isinstance(content, dict) or content.get("parameters"):
        raise UsageError("a model is loaded and unloaded as it lies in the folder: 'parameters' are not supported")
