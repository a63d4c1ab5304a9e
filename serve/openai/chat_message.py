"""The messages of a chat, as OpenAI's clients send them and as chat templates take them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from serve.openai.request_body import RequestPart
from serve.openai.tool_reader import parse_object
from serve.requests.public_errors import InvalidParameter

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(RequestPart):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(RequestPart):
    """A call of a function. arguments: an object in JSON. parsed_arguments: the same, as OpenAI's client adds it."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(RequestPart):
    """A call of a tool. index: as streams have it."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None


class Message(RequestPart):
    """A message of a chat. refusal, function_call, audio, annotations: as clients send back what they got, empty.
    parsed: the content once more, as OpenAI's client adds it."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, min_length=1)
    tool_call_id: str | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None
    parsed: Any = None

    def check(self, number: int) -> None:
        """Raise InvalidParameter where its parts do not fit together. number: of the message, from 1 on."""
        if self.content is None and self.tool_calls is None:
            raise InvalidParameter("messages", f"message {number} has no 'content'")
        if self.tool_calls is not None and self.role != "assistant":
            raise InvalidParameter("messages", f"message {number} has 'tool_calls', and is not the assistant's")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise InvalidParameter(
                "messages", f"'tool_call_id' belongs to messages of the role 'tool': message {number}"
            )
        for call in self.tool_calls or ():
            if parse_object(call.function.arguments) is None:
                raise InvalidParameter("messages", f"the arguments of a call in message {number} are no JSON object")

    def flatten(self) -> dict[str, Any]:
        """Return the message as templates take it: its content as one text, the arguments of its calls as objects."""
        parts = self.content if isinstance(self.content, list) else []
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls is not None:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": parse_object(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message
