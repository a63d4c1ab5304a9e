"""The hot path: V2 inference as raw ASGI.

FastAPI's routing alone costs 2.7 times the whole of this, and a BaseHTTPMiddleware would hide that a client hung up.
"""

import re
import time

from serve import kserve
from serve.model import VERSION, Model
from serve.repository import Repository
from serve.server_settings import Settings
from serve.wire import Answer, ClientGone, Headers, Receive, Scope, Send, pack, read_body, to_answer, while_connected

PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


class Infer:
    """Answers `POST /v2/models/{name}[/versions/{version}]/infer`."""

    def __init__(self, repository: Repository, settings: Settings) -> None:
        self.repository = repository
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer the request if it is one of ours; else leave it untouched and return False."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return False
        match = PATH.fullmatch(scope["path"])
        if match is None:
            return False
        headers: Headers = dict(scope["headers"])
        try:
            answer = await self._answer(match[1], match[2] or VERSION, headers, receive)
        except ClientGone:
            return True
        except Exception as error:  # noqa: BLE001 - an exception that gets out costs the client its connection
            answer = to_answer(error)
        await answer.send(send)
        return True

    async def _answer(self, name: str, version: str, headers: Headers, receive: Receive) -> Answer:
        model = self.repository.get(name, version)
        body = await read_body(headers, receive, self.settings.max_body)
        started = time.monotonic_ns()
        success = False
        try:
            async with while_connected(receive):
                answer = await self._infer(model, body, headers)
            success = True
            return answer
        finally:
            model.statistics.count_request(started, success=success)

    async def _infer(self, model: Model, body: bytes, headers: Headers) -> Answer:
        request = kserve.read_request(body, headers.get(b"inference-header-content-length"), model.outputs)
        outputs = await model.infer(request.inputs, timeout=request.timeout)
        return pack(kserve.write_answer(request, outputs, model=model.name, version=VERSION), headers)
