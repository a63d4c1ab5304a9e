"""Models that write about images: those of a chat are what the tower beside the decoder reads."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from laconic.arrays import Arrays
from laconic.runtimes.generator import EncoderInputs
from serve.generation.generation_worker import GenerationWorker
from serve.generation.text_writer import TextWriter, WritingTask


@runtime_checkable
class ImageTextTask(Protocol):
    """What is asked besides of the task of a model that writes about images."""

    def encode_prompt(self, text: str, images: Sequence[bytes]) -> Arrays:
        """Encode a rendered chat with the contents of its images' files: `input_ids` [1, seq], and what the tower
        reads. Raises InputError."""


class ImagePrompt(tuple[int, ...]):
    """The tokens of a prompt, among them the patches of its images. source: what the tower reads."""

    source: EncoderInputs

    @classmethod
    def of(cls, arrays: Arrays) -> "ImagePrompt":
        """Make a prompt of what a task encodes."""
        prompt = cls(arrays["input_ids"][0].tolist())
        prompt.source = EncoderInputs({name: each for name, each in arrays.items() if name != "input_ids"}, 0)
        return prompt


class ImageTextWriter(TextWriter):
    """Writes behind chats with images, or with none."""

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
        return self._encode(self.render(messages, tools), images)

    def encode_text(self, text: str) -> tuple[int, ...]:
        return self._encode(text, ())

    def _encode(self, text: str, images: Sequence[bytes]) -> tuple[int, ...]:
        prompt = ImagePrompt.of(self.task.encode_prompt(text, images))
        return prompt if images else self.check(prompt)

    def divide(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], EncoderInputs | None]:
        return tuple(prompt), prompt.source if isinstance(prompt, ImagePrompt) else None
