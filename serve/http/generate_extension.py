"""The generate extension of the V2 protocol: `POST /v2/models/{name}[/versions/{version}]/generate`, and
`generate_stream`, whose answer comes in events."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from laconic.errors import LaconicError
from serve.generation.text_writer import TextWriter
from serve.generation.written_choice import TextPiece
from serve.http.generate import TextEndpoint
from serve.model_repository.model import Model
from serve.openai.generate_request import GenerateRequest, read_generate_request
from serve.openai.text_answer import AnswerFormat
from serve.openai.text_request import TextRequest


class GenerateFormat(AnswerFormat):
    """The shape of an answer. version: of the model."""

    prefix, whole_kind, chunk_kind = "", "", ""

    def __init__(self, request: TextRequest, version: str, writer: TextWriter) -> None:
        super().__init__(request, writer.tokenizer)
        named = {"id": request.id} if isinstance(request, GenerateRequest) and request.id is not None else {}
        self._named = {**named, "model_name": request.model, "model_version": version}

    def format_choice(self, choice: TextPiece) -> dict[str, Any]:
        ended = {} if choice.finish_reason is None else {"finish_reason": choice.finish_reason}
        return {**self._named, "text_output": choice.text, **ended}

    def format_delta(self, piece: TextPiece) -> dict[str, Any]:
        return self.format_choice(piece)

    def whole(self, choices: Sequence[TextPiece], usage: Any) -> dict[str, Any]:
        (choice,) = choices
        return self.format_choice(choice)

    def chunks(self, piece: TextPiece) -> Iterable[dict[str, Any]]:
        yield self.format_choice(piece)


class Generate(TextEndpoint):
    """The continuation of a text."""

    pattern = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/generate")
    stream: ClassVar[bool] = False

    def read_request(self, match: re.Match[str], content: Any) -> GenerateRequest:
        return read_generate_request(content, model=match[1], is_stream=self.stream)

    def find_model(self, match: re.Match[str], request: TextRequest) -> Model:
        return self.repository.get(match[1], match[2])

    def make_format(self, request: TextRequest, model: Model, writer: TextWriter) -> AnswerFormat:
        return GenerateFormat(request, model.version, writer)

    def describe_error(self, public: LaconicError) -> Any:
        return {"error": str(public)}


class GenerateStream(Generate):
    """The continuation of a text, in events."""

    pattern = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/generate_stream")
    stream = True
