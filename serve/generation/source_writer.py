"""Models with an encoder that write: of a text, another one."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from laconic.runtimes.generator import EncoderInputs
from serve.generation.text_writer import TextWriter
from serve.requests.public_errors import ContextOverflow


@runtime_checkable
class TextSourceTask(Protocol):
    """What is asked besides of the task of an encoder-decoder that reads texts."""

    max_tokens: int


class SourceWriter(TextWriter):
    """Writes with an encoder-decoder that reads texts: a prompt is its source. context: the most tokens of that."""

    scores_prompts = False

    def limit(self, prompt: Sequence[int], asked: int | None) -> int:
        """Return the most tokens of an answer. asked: by the request, if it does. Raises ContextOverflow for a source
        that is longer than the model reads, and for an answer longer than it writes."""
        most = self.settings.max_new_tokens
        if len(prompt) > self.context or (asked or 0) > most:
            raise ContextOverflow(
                f"the model reads up to {self.context} tokens and writes up to {most}, and this asks for {len(prompt)} "
                f"and {asked or most}. Send a shorter text, or ask for fewer tokens"
            )
        return asked or most

    def divide(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], EncoderInputs | None]:
        ids = np.array([prompt], np.int64)
        return (), EncoderInputs({"input_ids": ids, "attention_mask": np.ones_like(ids)}, len(prompt))
