"""The POST routes as raw ASGI: what those of a model in the path, and those of a model in the body, have in common.

FastAPI's routing alone costs 2.7 times the whole of this, and a BaseHTTPMiddleware would hide that a client hung up.
"""

import asyncio
import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from laconic.errors import INTERRUPTS, InputError, NotReady, UsageError
from serve.asgi.body import read_body, read_json
from serve.asgi.wire import CLOSE, Answer, ClientGone, Headers, Receive, Scope, Send, WhileConnected, to_answer
from serve.http.event_stream import EventStream
from serve.model_repository.model import Model
from serve.model_repository.repository import Repository
from serve.requests.memory_budget import MemoryBudget, Reservation
from serve.requests.offload import OFFLOAD_FROM, offload
from serve.settings.server_settings import Settings

TIMEOUT = re.compile(rb"\d{1,9}(\.\d{1,20})?")


class MethodNotAllowed(UsageError):
    """The route takes another method."""

    status = 405


class Endpoint(ABC):
    """Answers requests to one route. budget: what all requests of the server may hold."""

    pattern: ClassVar[re.Pattern[str]]
    """The route's path."""

    def __init__(self, repository: Repository, settings: Settings, budget: MemoryBudget) -> None:
        self.repository = repository
        self.settings = settings
        self.budget = budget

    @abstractmethod
    async def _answer(self, match: re.Match[str], scope: Scope, receive: Receive, reservation: Reservation) -> Answer:
        """Answer a request whose body is not read yet. match: its path. Raises what goes wrong."""

    def refuse(self, error: BaseException) -> Answer:
        """Make the answer that tells the client about an error."""
        return to_answer(error)

    def respond_at_once(self, model: Model, body: bytes, headers: Headers) -> Answer | None:
        """Answer a request that is worth no waiting; return None for any other. Raises what goes wrong."""
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer the request if it is to this route; else leave it untouched and return False."""
        match = self.pattern.fullmatch(scope["path"])
        if match is None:
            return False
        if scope["method"] != "POST":
            error = f"{scope['method']} {scope['path']}: this route takes POST. GET /openapi.json lists what there is"
            answer = self.refuse(MethodNotAllowed(error))
            answer.headers.append((b"allow", b"POST"))
            await answer.send(send)
            return True
        reservation = Reservation(self.budget)
        try:
            answer = await self._answer(match, scope, receive, reservation)
        except ClientGone:
            reservation.release()
            return True
        except asyncio.CancelledError:  # the time that requests under way have to end is over
            answer = self.refuse(NotReady("the server stopped before this request had its turn. Try another replica"))
        except INTERRUPTS:
            raise
        except BaseException as error:  # noqa: BLE001 - an exception that gets out costs the client its connection
            answer = self.refuse(error)
            if any(name == b"expect" for name, _ in scope["headers"]):
                answer.headers.append(CLOSE)
        try:
            await answer.send(send)
        finally:
            reservation.release()
        return True


class ModelEndpoint(Endpoint):
    """A route whose path names a model, and perhaps its version."""

    @abstractmethod
    async def respond(self, model: Model, body: bytes, headers: Headers, reservation: Reservation) -> Answer:
        """Answer a whole request. Raises what goes wrong."""

    async def _answer(self, match: re.Match[str], scope: Scope, receive: Receive, reservation: Reservation) -> Answer:
        model = self.repository.get(match[1], match[2] if match.lastindex == 2 else None)
        headers: Headers = dict(scope["headers"])
        model.users += 1
        started = time.monotonic_ns()
        try:
            model.check_ready()
            model.batcher.check_room(1)  # before the body is read
            body = await read_body(headers, receive, self.settings.max_body, reservation)
            started = time.monotonic_ns()
            answer = self.respond_at_once(model, body, headers)
            if answer is None:
                async with WhileConnected(scope, receive):
                    answer = await self.respond(model, body, headers, reservation)
        except BaseException as error:
            model.statistics.count_failure(started, error)
            raise
        finally:
            model.users -= 1
        model.statistics.count_success(started)
        return answer


class NamesModel(Protocol):
    """A request that names its model."""

    @property
    def model(self) -> str:
        """The name."""


Request = TypeVar("Request", bound=NamesModel)


@dataclass
class ModelCall(Generic[Request]):
    """A request to a model, which counts among those under way until `end`. started: `time.monotonic_ns`. is_long:
    whether its body is so long that it is worked on off the event loop."""

    request: Request
    model: Model
    scope: Scope
    receive: Receive
    reservation: Reservation
    started: int
    is_long: bool

    @property
    def timeout(self) -> float | None:
        """The seconds that the request may wait, if it says so. Raises InputError."""
        return read_timeout(dict(self.scope["headers"]))

    def end(self, error: BaseException | None = None) -> None:
        """Count the request. error: that it ended with."""
        self.model.users -= 1
        if error is None:
            self.model.statistics.count_success(self.started)
        else:
            self.model.statistics.count_failure(self.started, error)


class BodyEndpoint(Endpoint, Generic[Request]):
    """Answers requests whose bodies say which model is asked, and what."""

    @abstractmethod
    def read_request(self, match: re.Match[str], content: Any) -> Request:
        """Read a request. match: its path. content: of its body. Raises InputError."""

    @abstractmethod
    async def respond(self, call: ModelCall[Request]) -> Answer:
        """Answer a request to a model that is ready; a stream ends the call by itself. Raises what goes wrong."""

    async def read_content(self, body: bytes, headers: Headers, reservation: Reservation) -> Any:
        """Read what a body holds. Raises InputError."""
        return await read_json(body, self.settings, reservation)

    def find_model(self, match: re.Match[str], request: Request) -> Model:
        """Find the model that is asked. Raises UnknownModel."""
        return self.repository.get(request.model)

    async def _answer(self, match: re.Match[str], scope: Scope, receive: Receive, reservation: Reservation) -> Answer:
        headers = dict(scope["headers"])
        body = await read_body(headers, receive, self.settings.max_body, reservation)
        started = time.monotonic_ns()
        long = len(body) > OFFLOAD_FROM
        async with WhileConnected(scope, receive):
            content = await self.read_content(body, headers, reservation)
            if long:
                request = await offload(self.read_request, match, content, long=True)
            else:
                request = self.read_request(match, content)
            model = self.find_model(match, request)
            model.users += 1
            call = ModelCall(request, model, scope, receive, reservation, started, long)
            try:
                model.check_ready()
                answer = await self.respond(call)
            except BaseException as error:
                call.end(error)
                raise
        if not isinstance(answer, EventStream):
            call.end()
        return answer


def read_timeout(headers: Headers) -> float | None:
    """Read the seconds in the header `Request-Timeout`. Raises InputError."""
    header = headers.get(b"request-timeout")
    if header is None:
        return None
    if not TIMEOUT.fullmatch(header) or not float(header):
        raise InputError(f"Request-Timeout is {header.decode('latin-1')[:40]!r}, expected a number of seconds")
    return float(header)
