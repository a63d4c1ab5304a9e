"""The messages of a chat, as OpenAI's clients send them and as chat templates take them."""

from base64 import b64decode
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


class ImageUrl(RequestPart):
    """Where an image is. detail: has no effect, since the checkpoint says at which size images are read."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(RequestPart):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def read(self, number: int) -> bytes:
        """Return the content of the image's file. number: of the message, from 1 on. Raises InvalidParameter: nothing
        is fetched from another server."""
        header, _, data = self.image_url.url.partition(",")
        if not header.startswith("data:image/") or not header.endswith(";base64"):
            raise InvalidParameter(
                "messages",
                f"the image in message {number} must be a URL 'data:image/png;base64,...' that holds it, with its own "
                f"format: images are not fetched from elsewhere",
            )
        try:
            return b64decode(data, validate=True)
        except ValueError:  # binascii.Error is one, and so is what other than ASCII raises
            raise InvalidParameter("messages", f"the image in message {number} is not valid base64") from None


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
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
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

    def read_images(self, number: int) -> list[bytes]:
        """Return the content of the image files of the message. number: of the message, from 1 on. Raises
        InvalidParameter."""
        return [part.read(number) for part in self.list_parts() if isinstance(part, ImagePart)]

    def list_parts(self) -> list[TextPart | ImagePart]:
        """List the parts of the message's content."""
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content or []

    def flatten(self, *, has_parts: bool = False) -> dict[str, Any]:
        """Return the message as templates take it: its content as one text, or as a list of parts, which say of an
        image only that it is there; the arguments of its calls as objects."""
        parts = self.list_parts()
        content: Any = "".join(part.text for part in parts if isinstance(part, TextPart))
        if has_parts:
            content = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in parts
            ]
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
