"""The application in front of vLLM: what every server of ours does for its clients, and the routes of one model."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Response

from laconic.errors import NotReady, UnknownModel
from serve.http.app import App
from serve.http.control import add_liveness, create_control_app, respond
from serve.http.endpoint import Endpoint
from serve.http.prometheus import (
    COUNTERS,
    DISTRIBUTIONS,
    NANOSECOND,
    Metrics,
    format_failures,
    format_head,
    format_histogram,
)
from serve.model_repository.repository import Repository
from serve.observation.observer import RequestObserver
from serve.openai.openai_shape import to_openai_answer
from serve.security.access import Access
from serve.settings.server_settings import Settings
from serve.vllm.relay import Relay
from serve.vllm.vllm_engine import VllmEngine

COUNTED = ("nv_inference_request_success", "nv_inference_request_duration_us")
"""Our counters that know what vLLM does: it has others of its own."""
REQUEST = "laconic_request_duration_seconds"
GATHER_SECONDS = 5.0
"""How long a scrape waits for vLLM's metrics."""
SHOWN = ("id", "object", "created", "parent", "max_model_len")
"""What clients are told of a model: vLLM would also name its folder."""


class VllmApp(App):
    """An ASGI application that passes requests for texts on to vLLM. On shutdown it stops vLLM."""

    def __init__(self, engine: VllmEngine, settings: Settings) -> None:
        self.engine = engine
        metrics = partial(VllmMetrics, engine)
        super().__init__(Repository(), settings, Access(settings), RequestObserver(settings), metrics=metrics)

    def create_control(self) -> FastAPI:
        app = create_control_app(self.close)
        add_liveness(app, self.check_ready, self.metrics)
        add_model(app, self)
        return app

    def create_endpoints(self) -> Sequence[Endpoint]:
        return [Relay(self.engine, self.repository, self.settings, self.budget)]

    def check_ready(self) -> None:
        """Raise NotReady once the server is told to stop, and while vLLM does not run."""
        if not self.repository.ready:
            raise NotReady("the server is stopping")
        self.engine.check_ready()

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await asyncio.to_thread(self.engine.close)


def add_model(app: FastAPI, served: VllmApp) -> None:
    """Add the routes of the model, and of adapters that vLLM serves beside it."""
    engine = served.engine

    @app.get("/v2/models/{name}/ready", tags=["models"], response_class=Response)
    async def model_ready(name: str) -> Response:
        """Answer whether the model is ready."""
        if name != engine.name:
            raise UnknownModel(f"no model {name!r} is served here, only {engine.name!r}")
        served.check_ready()
        return Response()

    @app.get("/v1/models", tags=["openai"], response_model=None)
    async def list_models() -> dict[str, Any] | Response:
        """List the models that are served, as OpenAI's clients read them."""
        try:
            return {"object": "list", "data": await read_models(engine)}
        except NotReady as error:
            return respond(to_openai_answer(error))

    @app.get("/v1/models/{name}", tags=["openai"], response_model=None)
    async def get_model(name: str) -> dict[str, Any] | Response:
        """Describe one model, as OpenAI's clients read it."""
        try:
            models = {model["id"]: model for model in await read_models(engine)}
            if name not in models:
                raise UnknownModel(f"no model {name!r} is served here, only {', '.join(map(repr, models))}")
            return models[name]
        except (NotReady, UnknownModel) as error:
            return respond(to_openai_answer(error))


async def read_models(engine: VllmEngine) -> list[dict[str, Any]]:
    """Read vLLM's list of models. Raises NotReady."""
    content = orjson.loads(await (await engine.ask("GET", "/v1/models")).read())
    return [
        {name: model[name] for name in SHOWN if model.get(name) is not None} | {"owned_by": "laconic"}
        for model in content["data"]
    ]


class VllmMetrics(Metrics):
    """Our metrics of the requests to vLLM, and behind them vLLM's own."""

    def __init__(self, engine: VllmEngine, repository: Repository, access: Access) -> None:
        super().__init__(repository, access)
        self.engine = engine

    async def gather(self) -> bytes:
        try:
            async with asyncio.timeout(GATHER_SECONDS):
                text = await (await self.engine.ask("GET", "/metrics")).read()
        except (NotReady, TimeoutError):
            text = b""
        return self.text() + choose_own(text)

    def _lines(self) -> Iterator[str]:
        statistics = self.engine.statistics
        labels = f'model="{self.engine.name}",version="1"'
        for name in COUNTED:
            yield from format_head(name, "counter", COUNTERS[name].help)
            yield f"{name}{{{labels}}} {COUNTERS[name].read(statistics)}"
        yield from format_failures([(labels, statistics)])
        yield from format_head(REQUEST, "histogram", DISTRIBUTIONS[REQUEST].help)
        yield from format_histogram(REQUEST, labels, statistics.request, NANOSECOND)
        yield from self._access_lines()


def choose_own(text: bytes) -> bytes:
    """Choose vLLM's own metrics, `vllm:...`, of all that it reports: those of its process bear the names of ours."""
    lines = text.splitlines(keepends=True)
    return b"".join(line for line in lines if line.removeprefix(b"# HELP ").removeprefix(b"# TYPE ")[:5] == b"vllm:")
