"""Requests of `POST /v1/chat/completions`."""

from typing import Any, Literal

from pydantic import Field

from serve.generation.text_writer import TextWriter
from serve.openai.openai_shape import InvalidParameter
from serve.openai.text_request import RequestPart, TextRequest, refuse


class TextPart(RequestPart):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(RequestPart):
    """A message of a chat, as the template takes it, with its parts joined."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def flatten(self) -> dict[str, str]:
        """Return the message with its content as one text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ResponseFormat(RequestPart):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(TextRequest):
    """A chat that is to be continued."""

    prompt_field = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs", "'top_logprobs' are a part of the logprobs. Set 'logprobs' to true")
        if self.response_format is not None and self.response_format.type != "text":
            refuse("response_format", True, "the engine cannot be held to JSON without its own tokenizer. Use 'text'")
        refuse("tools", self.tools, "put their description into a message")
        if self.tool_choice not in (None, "none", "auto"):
            refuse("tool_choice", True, "no tools are")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise InvalidParameter("max_tokens", "'max_tokens' is the older name of 'max_completion_tokens': give one")

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def has_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def likeliest(self) -> int:
        return self.top_logprobs or 0

    def encode_prompt(self, writer: TextWriter) -> tuple[int, ...]:
        return writer.encode_chat([message.flatten() for message in self.messages])
