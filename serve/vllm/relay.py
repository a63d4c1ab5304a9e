"""The routes of OpenAI's API that vLLM answers: bodies are checked and counted here, answers passed on as they come."""

import re
import time
from typing import Any

from laconic.errors import InputError, LaconicError, RuntimeFailure
from serve.asgi.body import read_body, read_json
from serve.asgi.wire import Answer, Receive, Scope, WhileConnected
from serve.http.endpoint import Endpoint
from serve.http.event_stream import EventStream
from serve.model_repository.repository import Repository
from serve.observation.logs import CURRENT
from serve.openai.openai_shape import describe_openai_error, to_openai_answer
from serve.requests.memory_budget import MemoryBudget, Reservation
from serve.requests.public_errors import InvalidParameter
from serve.security.keys import count_rows
from serve.settings.server_settings import Settings
from serve.vllm.upstream import UpstreamAnswer
from serve.vllm.vllm_engine import VllmEngine

EVENTS = b"text/event-stream"


class Relay(Endpoint):
    """Passes requests for texts on to vLLM, which reads their parameters itself."""

    pattern = re.compile(r"/v1/(?:chat/completions|completions)")

    def __init__(self, engine: VllmEngine, repository: Repository, settings: Settings, budget: MemoryBudget) -> None:
        super().__init__(repository, settings, budget)
        self.engine = engine

    def refuse(self, error: BaseException) -> Answer:
        return to_openai_answer(error)

    async def _answer(self, match: re.Match[str], scope: Scope, receive: Receive, reservation: Reservation) -> Answer:
        self.engine.check_ready()  # before the body is read
        body = await read_body(dict(scope["headers"]), receive, self.settings.max_body, reservation)
        started = time.monotonic_ns()
        try:
            async with WhileConnected(scope, receive):
                content = await read_json(body, self.settings, reservation)
                count_rows(count_choices(content, self.settings.max_rows))
                refuse_addresses(content)
                answer = await self.engine.ask("POST", match[0], body, CURRENT.get() or "")
                if answer.content_type.startswith(EVENTS):
                    return self._stream(answer, scope, receive, started)
                written = await answer.read()
            reservation.add(len(written))
        except BaseException as error:
            self.engine.statistics.count_failure(started, error)
            raise
        self._count(started, to_error(answer.status))
        return Answer(written, answer.status, answer.content_type)

    def _stream(self, answer: UpstreamAnswer, scope: Scope, receive: Receive, started: int) -> EventStream:
        """Return what passes a stream on. To end it hangs up, upon which vLLM writes no further."""

        def end(error: BaseException | None) -> None:
            answer.close()
            self._count(started, error)

        return EventStream(
            b"",
            content_type=answer.content_type,
            scope=scope,
            receive=receive,
            events=answer.events(),
            end=end,
            done=b"",
            describe_error=describe_openai_error,
        )

    def _count(self, started: int, error: BaseException | None) -> None:
        """Count an answered request. error: that it ended with."""
        if error is None:
            self.engine.statistics.count_success(started)
        else:
            self.engine.statistics.count_failure(started, error)


def count_choices(content: Any, most: int) -> int:
    """Count the texts that a request asks for: choices times prompts. most: that it may ask for. Raises InputError."""
    if not isinstance(content, dict):
        raise InputError(f"the request must be an object, not {type(content).__name__}")
    prompt, choices = content.get("prompt"), content.get("n") or 1
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    if not isinstance(choices, int):
        raise InvalidParameter("n", "'n' does not fit: it is the number of choices")
    rows = max(1, choices) * (len(prompt) if isinstance(prompt, list) and several else 1)
    if rows > most:
        raise InvalidParameter("n", f"the request asks for {rows} texts, and this server writes {most} at once")
    return rows


def refuse_addresses(content: dict[str, Any]) -> None:
    """Raise InvalidParameter for images and sounds in messages that vLLM would fetch from wherever a client says."""
    messages = content.get("messages")
    messages = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for each in contents if isinstance(each, list) for part in each if isinstance(part, dict)]
    for name, value in ((name, value) for part in parts for name, value in part.items() if name.endswith("_url")):
        address = value.get("url") if isinstance(value, dict) else value
        if isinstance(address, str) and not address.startswith("data:"):
            raise InvalidParameter("messages", f"{name!r} must be a 'data:' URL: this server fetches nothing")


def to_error(status: int) -> LaconicError | None:
    """Return what a status of vLLM counts as; None for success."""
    if status < 400:
        return None
    return InputError("vLLM refused a request") if status < 500 else RuntimeFailure("vLLM failed on a request")
