"""OpenAI's routes for text: `POST /v1/chat/completions` and `POST /v1/completions`."""

import re
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator
from itertools import islice
from typing import Any, ClassVar

from laconic.errors import LaconicError
from serve.asgi.wire import Answer, to_json
from serve.generation.text_writer import TextWriter, WrittenAnswer
from serve.generation.written_choice import TextPiece, join_pieces
from serve.http.endpoint import BodyEndpoint, ModelCall
from serve.http.event_stream import EVENTS, EventStream
from serve.model_repository.model import Model
from serve.observation.tracing import MAX_PARTS, TRACE, trace_step
from serve.openai.chat_request import ChatRequest
from serve.openai.completion_request import CompletionRequest
from serve.openai.openai_shape import describe_openai_error, to_openai_answer
from serve.openai.text_answer import AnswerFormat, ChatFormat, CompletionFormat, format_usage
from serve.openai.text_request import TextRequest
from serve.requests.offload import offload
from serve.requests.public_errors import InvalidParameter
from serve.security.keys import count_rows, name_caller


class TextEndpoint(BodyEndpoint[TextRequest]):
    """Texts, written token by token. done: what ends a stream."""

    done: ClassVar[bytes] = b""

    @abstractmethod
    def make_format(self, request: TextRequest, model: Model, writer: TextWriter) -> AnswerFormat:
        """Make the format of the answer."""

    @abstractmethod
    def describe_error(self, public: LaconicError) -> Any:
        """Describe an error to a client, JSON-ready."""

    async def respond(self, call: ModelCall[TextRequest]) -> Answer:
        request = call.request
        writer = find_writer(call.model)
        answer = await self._begin(request, writer, call.timeout or self.settings.deadline)
        shape = self.make_format(request, call.model, writer)
        pieces = request.read_pieces(answer, writer)
        if not request.stream:
            return Answer(to_json(await collect(answer, pieces, shape)))

        def finish(error: BaseException | None) -> None:
            end(answer)
            call.end(error)

        return EventStream(
            b"",
            content_type=EVENTS,
            scope=call.scope,
            receive=call.receive,
            events=stream(answer, pieces, shape, request.choices * request.prompts),
            end=finish,
            done=self.done,
            describe_error=self.describe_error,
        )

    async def _begin(self, request: TextRequest, writer: TextWriter, timeout: float) -> WrittenAnswer:
        """Begin to write an answer. timeout: seconds that the request may wait. Raises what goes wrong."""
        if request.prompts > (most := self.settings.max_rows):
            raise InvalidParameter(
                "prompt", f"there are {request.prompts} prompts, and this server takes {most} at once"
            )
        count_rows(request.choices * request.prompts)
        # Off the event loop: a long prompt takes the tokenizer milliseconds, a template runs code of its own, and a
        # grammar is compiled.
        started = time.monotonic_ns()
        prompts = await offload(request.prepare, writer)
        trace_step("encode", started)
        shown = request.find_shown(writer)
        return await writer.write(prompts, request.stops, timeout=timeout, key=name_caller(), shown=shown)


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
    if model.text_writer is None:
        raise InvalidParameter("model", f"model {model.name!r} does {model.task.name}, and writes no texts")
    return model.text_writer


def end(answer: WrittenAnswer) -> None:
    """Have the engine write no further, and note the answer in the trace of the request, if there is one."""
    answer.close()
    if (trace := TRACE.get()) is not None:
        for phase in islice(answer.list_phases(), 3 * MAX_PARTS):
            trace.add(phase.name, phase.start, phase.end, None, **phase.counts)


async def collect(answer: WrittenAnswer, pieces: AsyncGenerator[TextPiece, None], shape: AnswerFormat) -> Any:
    """Return a whole answer. pieces: of it."""
    choices: dict[int, list[TextPiece]] = {}
    try:
        async for piece in pieces:
            choices.setdefault(piece.choice, []).append(piece)
    finally:
        end(answer)
    joined = [join_pieces(choices[index]) for index in sorted(choices)]
    return shape.whole(joined, format_usage(answer))


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
        yield shape.chunk([], format_usage(answer))
