"""Chats with images, as samples of vision-language models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from laconic.errors import InputError
from laconic.tasks.chat_template import ASSISTANT, ChatTemplate, MarkedText

if TYPE_CHECKING:  # a base install has no Pillow
    from laconic.tasks.image_frames import Grid

Image = bytes | Path
"""The content of an image file, or its path."""


class ImageText(MarkedText):
    """A rendered chat with its images, in their order. grids: the tiles into which each is cut. written: the tokens of
    what is to be written behind it, where its text has no answer."""

    __slots__ = ("grids", "images", "written")

    images: tuple[Image, ...]
    grids: "tuple[Grid, ...]"
    written: tuple[int, ...]

    def __new__(
        cls,
        text: str,
        answers: Sequence[tuple[int, int]] = (),
        images: Sequence[Image] = (),
        grids: "Sequence[Grid]" = (),
        written: Sequence[int] = (),
    ) -> Self:
        made = super().__new__(cls, text, answers, has_special_tokens=True)
        made.images, made.grids, made.written = tuple(images), tuple(grids), tuple(written)
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.answers, self.images, self.grids, self.written

    def with_images(self, images: Sequence[Image]) -> Self:
        """Return the same chat with other images, cut into as many tiles."""
        return type(self)(self, self.answers, images, self.grids, self.written)

    def with_written(self, written: Sequence[int]) -> Self:
        """Return the same chat with what is to be written behind it."""
        return type(self)(self, self.answers, self.images, self.grids, written)


@dataclass(frozen=True)
class PatchTokens:
    """Tokens of a text in which the places of images have been taken by their patches, with ids below 0.

    ids: of the tokens, and -1 - n for patch n of all images. offsets: of each in the text. overflowing: those that were
    cut off.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    overflowing: list[Any]

    @property
    def attention_mask(self) -> list[int]:
        """All ones: without padding."""
        return [1] * len(self.ids)


def expand_images(encoding: Any, image_id: int, patches: int, layouts: Sequence[Sequence[int]]) -> PatchTokens:
    """Put what stands for images in their places in a text. image_id: the token that stands for an image in the text,
    and for a frame of `patches` patches in the tokens of its layout. layouts: of the images that come with the text.
    Raises InputError where the text has another number of places."""
    places = encoding.ids.count(image_id)
    if places != len(layouts) and not encoding.overflowing:
        raise InputError(
            f"the text has places for images, {places}, and comes with another number of them, {len(layouts)}: the "
            f"chat template does not show them all, or the text itself holds the token that stands for one. Leave that "
            f"token out"
        )
    rest = iter(layouts)
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    patch = 0
    for token, offset in zip(encoding.ids, encoding.offsets, strict=True):
        for each in next(rest, ()) if token == image_id else (token,):
            count = patches if each == image_id else 0
            ids += range(-1 - patch, -1 - patch - count, -1) if count else [each]
            patch += count
        offsets += [offset] * (len(ids) - len(offsets))
    return PatchTokens(ids, offsets, encoding.overflowing)


def render_image_chat(
    chat: ChatTemplate, messages: Any, images: Sequence[Image] = (), grids: "Sequence[Grid]" = ()
) -> ImageText:
    """Render a chat, up to where the next answer begins unless it ends with one. messages: as OpenAI describes them;
    of an image a part says only that it is there, as `{"type": "image"}`, and where none does, the first message of
    the user begins with all. Raises InputError."""
    parts = [split_parts(message, number) for number, message in enumerate(messages, 1)]
    if not parts:
        raise InputError("the chat has no messages")
    places = sum(part["type"] == "image" for message in parts for part in message["content"])
    users = [message for message in parts if message["role"] == "user"]
    if images and not places and users:
        users[0]["content"][:0] = [{"type": "image"}] * len(images)
        places = len(images)
    if places != len(images):
        raise InputError(
            f"the messages show {places} images, and {len(images)} came with them. Give each image one part of the "
            f"type 'image'"
        )
    if parts[-1]["role"] != ASSISTANT:
        return ImageText(chat.render(parts, prompt=True), (), images, grids)
    text = chat.mark_answers(parts)
    return ImageText(text, text.answers, images, grids)


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
