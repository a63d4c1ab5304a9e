"""Chats with an image, as samples of vision-language models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from laconic.arrays import Array
from laconic.errors import InputError
from laconic.tasks.chat_template import ASSISTANT, ChatTemplate, MarkedText

Image = bytes | Path | Array | None
"""The content of an image file, its path, or the array that is made of it, [channels, height, width] float32."""


class ImageText(MarkedText):
    """A rendered chat with its image. image: None for a chat without. written: the tokens of what is to be written
    behind it, where its text has no answer."""

    __slots__ = ("image", "written")

    image: Image
    written: tuple[int, ...]

    def __new__(
        cls,
        text: str,
        answers: Sequence[tuple[int, int]] = (),
        image: Image = None,
        written: Sequence[int] = (),
    ) -> Self:
        made = super().__new__(cls, text, answers, has_special_tokens=True)
        made.image, made.written = image, tuple(written)
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.answers, self.image, self.written


@dataclass(frozen=True)
class PatchTokens:
    """Tokens of a text in which the place of an image has been taken by its patches, with ids below 0.

    ids: of the tokens, and -1 - n for patch n. offsets: of each in the text. overflowing: those that were cut off.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    overflowing: list[Any]

    @property
    def attention_mask(self) -> list[int]:
        """All ones: without padding."""
        return [1] * len(self.ids)


def expand_image(encoding: Any, image_id: int, patches: int, images: int) -> PatchTokens:
    """Put the patches of an image in its place in a text. image_id: the token that stands for an image. images: those
    that come with the text, at most one. Raises InputError where the text has another number of places."""
    places = encoding.ids.count(image_id)
    if places != images and not encoding.overflowing:
        raise InputError(
            f"the text has places for images, {places}, and comes with another number of them, {images}: the chat "
            f"template shows no image, or the text itself holds the token that stands for one. Leave that token out"
        )
    counts = [patches if token == image_id else 1 for token in encoding.ids]
    ids = [
        token if count == 1 and token != image_id else -1 - patch
        for token, count in zip(encoding.ids, counts, strict=True)
        for patch in range(count)
    ]
    offsets = [offset for offset, count in zip(encoding.offsets, counts, strict=True) for _ in range(count)]
    return PatchTokens(ids, offsets, encoding.overflowing)


def render_image_chat(chat: ChatTemplate, messages: Any, image: Image) -> ImageText:
    """Render a chat, up to where the next answer begins unless it ends with one. messages: as OpenAI describes them;
    of an image a part says only that it is there, as `{"type": "image"}`, and where none does, the first message of
    the user begins with it. Raises InputError."""
    parts = [split_parts(message, number) for number, message in enumerate(messages, 1)]
    if not parts:
        raise InputError("the chat has no messages")
    places = sum(part["type"] == "image" for message in parts for part in message["content"])
    users = [message for message in parts if message["role"] == "user"]
    if image is not None and not places and users:
        users[0]["content"].insert(0, {"type": "image"})
        places = 1
    if places != (image is not None):
        raise InputError(
            f"the messages show {places} images, and {int(image is not None)} came with them. Give one image, and one "
            f"part of the type 'image'"
        )
    if parts[-1]["role"] != ASSISTANT:
        return ImageText(chat.render(parts, prompt=True), image=image)
    text = chat.mark_answers(parts)
    return ImageText(text, text.answers, image)


def split_parts(message: Any, number: int) -> dict[str, Any]:
    """Return a message with its content as a list of parts. number: of the message, from 1 on. Raises InputError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"message {number} has no 'role', a string")
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(map(is_part, parts)):
        raise InputError(
            f"the content of message {number} must be a text, or a list of {{'type': 'text', 'text': ...}} and "
            f"{{'type': 'image'}}"
        )
    return {**message, "content": list(parts)}


def is_part(part: Any) -> bool:
    """Return whether a value is a part of a message."""
    if not isinstance(part, Mapping):
        return False
    return part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str))
