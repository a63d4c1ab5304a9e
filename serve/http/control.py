"""The control plane: health, metadata, statistics, metrics, errors and OpenAPI, by FastAPI."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from laconic import __version__
from laconic.artifacts.manifest import MANIFEST
from laconic.errors import LaconicError, UnknownModel
from laconic.runtimes.adapter_config import WEIGHTS
from serve.asgi.wire import Answer, to_answer, to_json
from serve.http import openapi
from serve.http.endpoint import MethodNotAllowed
from serve.http.page import add_page
from serve.http.prometheus import CONTENT_TYPE, Metrics
from serve.model_repository.adapter_model import AdapterModel
from serve.model_repository.model import Model
from serve.model_repository.repository import Repository
from serve.openai.openai_shape import to_openai_answer
from serve.protocol import metadata


def create_control(repository: Repository, metrics: Metrics, close: Callable[[], Awaitable[None]]) -> FastAPI:
    """Create the FastAPI application of a repository. close: called when it shuts down."""
    app = create_control_app(close)
    app.openapi = lambda: openapi.describe(app, repository)  # type: ignore[method-assign]
    add_page(app, repository)
    add_liveness(app, lambda: metadata.check_server(repository), metrics)
    add_server(app, repository)
    add_models(app, repository)
    add_openai_models(app, repository)
    return app


def create_control_app(close: Callable[[], Awaitable[None]]) -> FastAPI:
    """Create a FastAPI application that has nothing but our errors. close: called when it shuts down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await close()

    app = FastAPI(
        title="Laconic",
        summary="Models that give the same answers, with fewer bits.",
        version=__version__,
        lifespan=lifespan,
        # Their pages fetch scripts from elsewhere, and this server is often where there is no elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    add_errors(app)
    return app


def add_errors(app: FastAPI) -> None:
    """Answer every error with `{"error": "..."}`: V2 clients read nothing else."""

    @app.exception_handler(LaconicError)
    async def on_laconic_error(_: Request, error: LaconicError) -> Response:
        return respond(to_answer(error))

    @app.exception_handler(Exception)
    async def on_fault(_: Request, error: Exception) -> Response:
        return respond(to_answer(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}. GET /openapi.json lists what there is"
        answer = Answer(to_json({"error": text}), error.status_code)
        if error.status_code != MethodNotAllowed.status:
            return respond(answer, error.headers)
        # Starlette names those of the first route alone where a path has several.
        return respond(answer, {"allow": ", ".join(sorted(find_methods(app, request)))})

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        problems = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        return respond(Answer(to_json({"error": problems}), 422))


def find_methods(app: FastAPI, request: Request) -> set[str]:
    """Find the methods that the path of a request has."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    return {method for route in routes if route.path_regex.match(request.url.path) for method in route.methods or ()}


def respond(answer: Answer, headers: Any = None) -> Response:
    """Make a response of Starlette from an answer."""
    response = Response(answer.body, answer.status, headers, answer.content_type.decode())
    for name, value in answer.headers:
        response.headers[name.decode()] = value.decode()
    return response


def add_liveness(app: FastAPI, check: Callable[[], None], metrics: Metrics) -> None:
    """Add the routes that say what the server is, and how it fares. check: raises NotReady."""

    @app.get("/v2", tags=["server"])
    async def server_metadata() -> dict[str, Any]:
        """Return the server's name, version and protocol extensions."""
        return metadata.server_metadata()

    @app.get("/v2/health/live", tags=["server"], response_class=Response)
    async def live() -> Response:
        """Answer while the process runs."""
        return Response()

    @app.get("/v2/health/ready", tags=["server"], response_class=Response)
    async def ready() -> Response:
        """Answer whether requests are welcome; 503 once the server is told to stop, while it serves no model or lacks a
        required one, and while a model has no engine."""
        check()
        return Response()

    @app.get("/metrics", tags=["server"], response_class=Response)
    async def prometheus_metrics() -> Response:
        """Return counters for Prometheus, under Triton's names."""
        return Response(await metrics.gather(), media_type=CONTENT_TYPE)


def add_server(app: FastAPI, repository: Repository) -> None:
    """Add the routes of all models together."""

    @app.post("/v2/repository/index", tags=["server"])
    async def repository_index() -> list[dict[str, str]]:
        """List the models that are served. Needs no body."""
        return metadata.repository_index(repository)

    @app.get("/v2/models/stats", tags=["server"])
    async def all_statistics() -> dict[str, Any]:
        """Return the counters of every model."""
        return metadata.all_statistics(repository)


def add_openai_models(app: FastAPI, repository: Repository) -> None:
    """Add OpenAI's list of models."""

    @app.get("/v1/models", tags=["openai"])
    async def list_models() -> dict[str, Any]:
        """List the models that are served, as OpenAI's clients read them."""
        return {"object": "list", "data": [openai_model(model) for model in repository]}

    @app.get("/v1/models/{name}", tags=["openai"], response_model=None)
    async def get_model(name: str) -> dict[str, Any] | Response:
        """Describe one model, as OpenAI's clients read it."""
        try:
            return openai_model(repository.get(name))
        except UnknownModel as error:
            return respond(to_openai_answer(error))


def openai_model(model: Model) -> dict[str, Any]:
    """Describe a model for the list of models; of an adapter, `parent` is its base, as in vLLM. The manifest of the
    artifact, or the weights of the adapter, say when it was created, in seconds since 1970."""
    created = 0
    file = model.folder / WEIGHTS if isinstance(model, AdapterModel) else model.artifact.path / MANIFEST
    with suppress(OSError):
        created = int(file.stat().st_mtime)
    parent = {"parent": model.base.name} if isinstance(model, AdapterModel) else {}
    return {"id": model.name, "object": "model", "created": created, "owned_by": "laconic", **parent}


def add_models(app: FastAPI, repository: Repository) -> None:
    """Add the routes of one model, each also with the version in its path."""

    def model_ready(model: Model) -> Response:
        """Answer whether the model is ready."""
        metadata.check_model(repository, model)
        return Response()

    add_model_route(app, repository, "", metadata.model_metadata)
    add_model_route(app, repository, "/ready", model_ready, response=Response)
    add_model_route(app, repository, "/config", metadata.model_configuration)
    add_model_route(app, repository, "/stats", metadata.model_statistics)


def add_model_route(
    app: FastAPI,
    repository: Repository,
    suffix: str,
    describe: Callable[[Model], Any],
    response: type[Response] = JSONResponse,
) -> None:
    """Add a route of one model. describe: makes the answer from the model; its docstring is the route's."""

    async def current(name: str) -> Any:
        return describe(repository.get(name))

    async def versioned(name: str, version: str) -> Any:
        return describe(repository.get(name, version))

    for path, endpoint in (("", current), ("/versions/{version}", versioned)):
        app.add_api_route(
            f"/v2/models/{{name}}{path}{suffix}",
            endpoint,
            tags=["models"],
            name=f"{describe.__name__}{'_of_version' if path else ''}",
            description=describe.__doc__,
            response_class=response,
            response_model=None,
        )
