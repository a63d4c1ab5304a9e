"""The routes that load and unload the models of the watched folder, as Triton's model repository extension has them."""

from fastapi import FastAPI, Request, Response

from serve.http.control_body import read_control_body
from serve.model_repository.watched_folder import WatchedFolder
from serve.protocol.repository_control import control_model
from serve.settings.server_settings import Settings


def add_model_control(app: FastAPI, folder: WatchedFolder | None, settings: Settings) -> None:
    """Add the routes. folder: where the models lie; without one, the routes say so."""

    @app.post("/v2/repository/models/{name}/load", tags=["server"], response_class=Response)
    async def load(name: str, request: Request) -> Response:
        """Load the newest version of a model in the folder. Answers when it is served."""
        await control_model(folder, settings, WatchedFolder.load, name, await read_control_body(request))
        return Response()

    @app.post("/v2/repository/models/{name}/unload", tags=["server"], response_class=Response)
    async def unload(name: str, request: Request) -> Response:
        """Serve a model no longer. Requests under way are answered."""
        await control_model(folder, settings, WatchedFolder.unload, name, await read_control_body(request))
        return Response()
