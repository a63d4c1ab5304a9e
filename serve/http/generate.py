"""OpenAI's routes for text: `POST /v1/chat/completions` and `POST /v1/completions`."""

import re
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, ClassVar

from laconic.errors import LaconicError
from serve.asgi.body import read_body, read_json
from serve.asgi.wire import Answer, Receive, Scope, WhileConnected, to_json
from serve.generation.text_writer import TextWriter, WrittenAnswer
from serve.generation.written_choice import TextPiece, join_pieces
from serve.http.endpoint import Endpoint, read_timeout
from serve.http.event_stream import EVENTS, EventStream
from serve.model_repository.model import Model
from serve.openai.chat_request import ChatRequest
from serve.openai.completion_request import CompletionRequest
from serve.openai.openai_shape import InvalidParameter, describe_openai_error, to_openai_answer
from serve.openai.text_answer import AnswerFormat, ChatFormat, CompletionFormat, format_usage
from serve.openai.text_request import TextRequest
from serve.requests.memory_budget import Reservation
from serve.requests.offload import offload
from serve.security.keys import CALLER, count_rows


class TextEndpoint(Endpoint):
    """Texts, written token by token. done: what ends a stream."""

    done: ClassVar[bytes] = b""

    @abstractmethod
    def read_request(self, match: re.Match[str], content: Any) -> TextRequest:
        """Read a request. match: its path. content: its body. Raises InputError."""

    @abstractmethod
    def make_format(self, request: TextRequest, model: Model, writer: TextWriter) -> AnswerFormat:
        """Make the format of the answer."""

    @abstractmethod
    def describe_error(self, public: LaconicError) -> Any:
        """Describe an error to a client, JSON-ready."""

    def find_model(self, match: re.Match[str], request: TextRequest) -> Model:
        """Find the model that is asked. Raises UnknownModel."""
        return self.repository.get(request.model)

    async def _answer(self, match: re.Match[str], scope: Scope, receive: Receive, reservation: Reservation) -> Answer:
        headers = dict(scope["headers"])
        body = await read_body(headers, receive, self.settings.max_body, reservation)
        started = time.monotonic_ns()
        async with WhileConnected(scope, receive):
            request = self.read_request(match, await read_json(body, self.settings, reservation))
            model = self.find_model(match, request)
            writer = find_writer(model)
            end = partial(self._end, model, started)
            model.users += 1
            try:
                timeout = read_timeout(headers) or self.settings.deadline
                answer = await self._begin(request, model, writer, timeout)
                shape = self.make_format(request, model, writer)
                pieces = request.read_pieces(answer, writer)
                if not request.stream:
                    content = await collect(answer, pieces, shape)
            except BaseException as error:
                end(error)
                raise
        if not request.stream:
            end(None)
            return Answer(to_json(content))

        def finish(error: BaseException | None) -> None:
            answer.close()
            end(error)

        events = stream(answer, pieces, shape, request.choices * request.prompts)
        return EventStream(
            b"",
            content_type=EVENTS,
            scope=scope,
            receive=receive,
            events=events,
            end=finish,
            done=self.done,
            describe_error=self.describe_error,
        )

    async def _begin(self, request: TextRequest, model: Model, writer: TextWriter, timeout: float) -> WrittenAnswer:
        """Begin to write an answer. timeout: seconds that the request may wait. Raises what goes wrong."""
        model.check_ready()
        if request.prompts > (most := self.settings.max_rows):
            raise InvalidParameter(
                "prompt", f"there are {request.prompts} prompts, and this server takes {most} at once"
            )
        count_rows(request.choices * request.prompts)
        # Off the event loop: a long prompt takes the tokenizer milliseconds, a template runs code of its own, and a
        # grammar is compiled.
        prompts = await offload(request.prepare, writer)
        caller = CALLER.get()
        return await writer.write(
            prompts,
            request.stops,
            timeout=timeout,
            key="" if caller is None else caller.name,
            shown=request.find_shown(writer),
        )

    def _end(self, model: Model, started: int, error: BaseException | None) -> None:
        """Count a request that has ended. error: that it ended with."""
        model.users -= 1
        if error is None:
            model.statistics.count_success(started)
        else:
            model.statistics.count_failure(started, error)


class OpenAiText(TextEndpoint):
    """Texts in OpenAI's API."""

    done = b"data: [DONE]\n\n"
    request: ClassVar[type[TextRequest]]
    format: ClassVar[type[AnswerFormat]]

    def refuse(self, error: BaseException) -> Answer:
        return to_openai_answer(error)

    def read_request(self, match: re.Match[str], content: Any) -> TextRequest:
        return self.request.read(content)

    def make_format(self, request: TextRequest, model: Model, writer: TextWriter) -> AnswerFormat:
        return self.format(request, writer.tokenizer)

    def describe_error(self, public: LaconicError) -> Any:
        return describe_openai_error(public)


class ChatCompletions(OpenAiText):
    """The next message of a chat."""

    pattern = re.compile(r"/v1/chat/completions")
    request = ChatRequest
    format = ChatFormat


class Completions(OpenAiText):
    """The continuation of a text."""

    pattern = re.compile(r"/v1/completions")
    request = CompletionRequest
    format = CompletionFormat


def find_writer(model: Model) -> TextWriter:
    """Return what writes with a model. Raises InvalidParameter for one that does something else."""
    if model.writer is None:
        raise InvalidParameter("model", f"model {model.name!r} does {model.task.name}, and writes no texts")
    return model.writer


async def collect(answer: WrittenAnswer, pieces: AsyncGenerator[TextPiece, None], shape: AnswerFormat) -> Any:
    """Return a whole answer. pieces: of it."""
    choices: dict[int, list[TextPiece]] = {}
    try:
        async for piece in pieces:
            choices.setdefault(piece.choice, []).append(piece)
    finally:
        answer.close()
    joined = [join_pieces(choices[index]) for index in sorted(choices)]
    return shape.whole(joined, format_usage(answer.prompt_tokens, answer.tokens))


async def stream(
    answer: WrittenAnswer, pieces: AsyncGenerator[TextPiece, None], shape: AnswerFormat, choices: int
) -> AsyncGenerator[Any, None]:
    """Yield the chunks of an answer as they come. pieces: of it."""
    for chunk in shape.opening(choices):
        yield chunk
    async for piece in pieces:
        for chunk in shape.chunks(piece):
            yield chunk
    if shape.has_usage:
        yield shape.chunk([], format_usage(answer.prompt_tokens, answer.tokens))
