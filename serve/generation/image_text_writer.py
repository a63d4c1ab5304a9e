"""Models that write about an image: a chat's image is what the tower of images beside the decoder reads."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from laconic.arrays import Arrays
from laconic.errors import InputError
from laconic.runtimes.generator import EncoderInputs
from serve.generation.generation_worker import GenerationWorker
from serve.generation.text_writer import TextWriter, WritingTask


@runtime_checkable
class ImageTextTask(Protocol):
    """What is asked besides of the task of a model that writes about images."""

    def encode_prompt(self, text: str, image: bytes | None) -> Arrays:
        """Encode a rendered chat with the content of its image's file: `input_ids` [1, seq], and what the tower reads.
        Raises InputError."""


class ImagePrompt(tuple[int, ...]):
    """The tokens of a prompt, among them the patches of its image. source: what the tower reads."""

    source: EncoderInputs

    @classmethod
    def of(cls, arrays: Arrays) -> "ImagePrompt":
        """Make a prompt of what a task encodes."""
        prompt = cls(arrays["input_ids"][0].tolist())
        prompt.source = EncoderInputs({name: each for name, each in arrays.items() if name != "input_ids"}, 0)
        return prompt


class ImageTextWriter(TextWriter):
    """Writes behind chats with one image, or none."""

    reads_images = True

    def __init__(self, worker: GenerationWorker, task: WritingTask, images: ImageTextTask) -> None:
        super().__init__(worker, task, task.max_tokens, task.chat)
        self.task = images

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[bytes] = (),
    ) -> tuple[int, ...]:
        if len(images) > 1:
            raise InputError(f"the chat has {len(images)} images, and the model reads one. Send one")
        return self._encode(self.render(messages, tools), images[0] if images else None)

    def encode_text(self, text: str) -> tuple[int, ...]:
        return self._encode(text, None)

    def _encode(self, text: str, image: bytes | None) -> tuple[int, ...]:
        prompt = ImagePrompt.of(self.task.encode_prompt(text, image))
        return prompt if image is not None else self.check(prompt)

    def divide(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], EncoderInputs | None]:
        return tuple(prompt), prompt.source if isinstance(prompt, ImagePrompt) else None
