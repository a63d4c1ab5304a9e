"""Requests of `POST /v1/chat/completions`."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from laconic.errors import InputError
from laconic.runtimes.grammar import check_grammar, grammar_of_schema
from serve.generation.text_writer import TextWriter, WrittenAnswer
from serve.generation.written_choice import TextPiece
from serve.openai.chat_message import FunctionName, Message
from serve.openai.request_body import RequestPart
from serve.openai.text_request import TextRequest
from serve.openai.tool_format import ToolFormat, find_special_tokens
from serve.openai.tool_grammar import complete_schema, make_call_grammar
from serve.openai.tool_reader import ToolReader, find_tool_format
from serve.requests.public_errors import InvalidParameter

ANY_OBJECT = {"type": "object"}


class JsonSchema(RequestPart):
    """A JSON schema that an answer must match. It is held to it whether it is `strict` or not."""

    name: FunctionName
    description: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestPart):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(RequestPart):
    """A function that may be called. strict: whether its arguments must match its schema where it is left to the model
    whether it is called; where it must be called, they do."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def describe(self) -> Mapping[str, Any]:
        """Return the function as templates take it: what the client gave, in the order of the fields."""
        fields = {name: getattr(self, name) for name in Function.model_fields}
        return {name: value for name, value in fields.items() if value is not None}


class Tool(RequestPart):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class NamedFunction(RequestPart):
    """The name of a function."""

    name: str


class NamedTool(RequestPart):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(TextRequest):
    """A chat that is to be continued."""

    prompt_field = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs", "'top_logprobs' are a part of the logprobs. Set 'logprobs' to true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise InvalidParameter("max_tokens", "'max_tokens' is the older name of 'max_completion_tokens': give one")
        for number, message in enumerate(self.messages, 1):
            message.check(number)
        shape = self.response_format
        if shape is not None and (shape.type == "json_schema") != (shape.json_schema is not None):
            raise InvalidParameter(
                "response_format", "'response_format' does not fit: 'json_schema' is for the type 'json_schema' alone"
            )
        self._check_tools()

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidParameter("tools", "'tools' has two functions of one name")
        choice = self.tool_choice
        if choice == "required" and not names:
            raise InvalidParameter("tool_choice", "'tool_choice' requires a call, and there are no 'tools'")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidParameter(
                "tool_choice", f"'tool_choice' names function {choice.function.name[:64]!r}, which is not in 'tools'"
            )

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def has_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def likeliest(self) -> int:
        return self.top_logprobs or 0

    @property
    def functions(self) -> Sequence[Function]:
        """The functions that may be called."""
        choice = self.tool_choice
        named = choice.function.name if isinstance(choice, NamedTool) else None
        functions = [] if choice == "none" else [tool.function for tool in self.tools or ()]
        return [function for function in functions if named in (None, function.name)]

    @property
    def has_calls(self) -> bool:
        return bool(self.functions)

    @property
    def is_single(self) -> bool:
        """Whether a choice has one call at most."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)

    def encode_prompts(self, writer: TextWriter) -> Sequence[tuple[int, ...]]:
        tools = None
        if self.functions:
            self.find_format(writer)
            tools = [{"type": tool.type, "function": tool.function.describe()} for tool in self.tools or ()]
        has_parts = writer.reads_images
        messages: Sequence[Mapping[str, Any]] = [each.flatten(has_parts=has_parts) for each in self.messages]
        images = [image for number, each in enumerate(self.messages, 1) for image in each.read_images(number)]
        template = writer.require_chat().for_tools if tools else writer.require_chat()
        if any("tool_calls" in message for message in messages) and not template.shown_call:
            messages = write_calls(messages, template.text)
        return [writer.encode_chat(messages, tools, images)]

    def find_format(self, writer: TextWriter) -> ToolFormat:
        """Return how the model writes calls. Raises InvalidParameter where it writes none."""
        template = writer.require_chat().for_tools
        try:
            if not template.reads_tools:
                raise InputError("the model's chat template does not read 'tools'")
            return find_tool_format(template.text, template.shown_call)
        except InputError as error:
            raise InvalidParameter("tools", f"'tools' is not supported: {error}") from None

    def find_shown(self, writer: TextWriter) -> Mapping[int, str]:
        return {token: text for text, token in self._find_specials(writer).items()}

    def _find_specials(self, writer: TextWriter) -> Mapping[str, int]:
        """Find the special tokens that calls have, by their texts."""
        if not self.functions:
            return {}
        return find_special_tokens(writer.tokenizer.get_added_tokens_decoder(), self.find_format(writer))

    def make_grammar(self, writer: TextWriter) -> str:
        answer = self._find_answer_schema()
        functions = self.functions
        must_call = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        is_strict = any(function.strict for function in functions)
        if functions and (must_call or is_strict or answer is not None):
            return self._make_call_grammar(writer, None if must_call else answer, is_free=not must_call)
        return "" if answer is None else hold("response_format", partial(grammar_of_schema, answer))

    def _find_answer_schema(self) -> Mapping[str, Any] | None:
        """Return the schema of the answer's text; None where any text will do."""
        shape = self.response_format
        if shape is None or shape.type == "text":
            return None
        return ANY_OBJECT if shape.json_schema is None else shape.json_schema.definition

    def _make_call_grammar(self, writer: TextWriter, answer: Mapping[str, Any] | None, *, is_free: bool) -> str:
        if answer is not None:
            hold("response_format", partial(grammar_of_schema, answer))

        def make() -> str:
            return make_call_grammar(
                self.find_format(writer),
                {function.name: complete_schema(function.parameters) for function in self.functions},
                specials=self._find_specials(writer),
                is_several=not self.is_single,
                answer=answer,
                is_free=is_free,
            )

        return hold("tools", make)

    def read_pieces(self, answer: WrittenAnswer, writer: TextWriter) -> AsyncGenerator[TextPiece, None]:
        if not self.functions:
            return answer.pieces()
        return self._read_calls(answer, self.find_format(writer))

    async def _read_calls(self, answer: WrittenAnswer, tools: ToolFormat) -> AsyncGenerator[TextPiece, None]:
        names = {function.name for function in self.functions}
        readers: dict[int, ToolReader] = {}
        async for piece in answer.pieces():
            reader = readers.setdefault(piece.choice, ToolReader(tools, names, self.is_single))
            piece = reader.read(piece)
            if reader.is_done:
                answer.end(piece.choice)
            if piece.text or piece.calls or piece.logprobs or piece.finish_reason:
                yield piece


def write_calls(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Return a chat whose calls stand in the texts of its messages, as the model wrote them, for a template that shows
    texts alone. Raises InputError for a template of which no format of calls is known."""
    try:
        tools = find_tool_format(template)
    except InputError:
        raise InputError("the model's chat template knows no calls of tools in messages") from None
    written: list[Mapping[str, Any]] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            text = tools.write([call["function"] for call in calls])
            content = message["content"]
            if isinstance(content, list):
                content = [*content, {"type": "text", "text": text}]
            else:
                content = "\n".join(filter(None, (content, text)))
            message = {**message, "content": content}
        written.append({key: value for key, value in message.items() if key != "tool_calls"})
    return written


def hold(parameter: str, make: Callable[[], str]) -> str:
    """Make a grammar and check it. parameter: that asks for it. Raises InvalidParameter for what no answer can be held
    to."""
    try:
        grammar = make()
        check_grammar(grammar)
    except InvalidParameter:
        raise
    except RecursionError:
        raise InvalidParameter(parameter, f"{parameter!r} does not fit: a schema is nested too deep") from None
    except InputError as error:
        raise InvalidParameter(parameter, f"{parameter!r} does not fit: {error}") from None
    return grammar
