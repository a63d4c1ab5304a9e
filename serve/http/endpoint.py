"""The POST routes of a model, as raw ASGI: what inference on tensors and on samples have in common.

FastAPI's routing alone costs 2.7 times the whole of this, and a BaseHTTPMiddleware would hide that a client hung up.
"""

import asyncio
import re
import time
from abc import ABC, abstractmethod
from typing import ClassVar

from laconic.errors import INTERRUPTS, InputError, NotReady, UsageError
from serve.asgi.body import read_body
from serve.asgi.wire import CLOSE, Answer, ClientGone, Headers, Receive, Scope, Send, WhileConnected, to_answer
from serve.model_repository.model import Model
from serve.model_repository.repository import Repository
from serve.requests.memory_budget import MemoryBudget, Reservation
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


def read_timeout(headers: Headers) -> float | None:
    """Read the seconds in the header `Request-Timeout`. Raises InputError."""
    header = headers.get(b"request-timeout")
    if header is None:
        return None
    if not TIMEOUT.fullmatch(header) or not float(header):
        raise InputError(f"Request-Timeout is {header.decode('latin-1')[:40]!r}, expected a number of seconds")
    return float(header)
