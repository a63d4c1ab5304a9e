"""Requests of `POST /v1/completions`."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import Field

from serve.generation.text_writer import TextWriter, WrittenAnswer
from serve.generation.written_choice import TextPiece
from serve.openai.text_request import TextRequest, refuse


class CompletionRequest(TextRequest):
    """Texts, or the ids of their tokens, that are to be continued."""

    prompt_field = "prompt"

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.has_logprobs:
            refuse("echo", self.echo, "the prompt is not scored. Leave 'logprobs' out")
        refuse("suffix", self.suffix, "the model continues texts")
        if self.best_of not in (None, self.choices):
            refuse("best_of", True, "no choice is left out. Use 'n'")

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def likeliest(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> int:
        return len(self._list_prompts())

    def _list_prompts(self) -> Sequence[Any]:
        """Return the prompts, each a text or ids of tokens."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]

    def encode_prompts(self, writer: TextWriter) -> Sequence[tuple[int, ...]]:
        return [
            writer.encode_text(prompt) if isinstance(prompt, str) else writer.check(prompt)
            for prompt in self._list_prompts()
        ]

    def read_pieces(self, answer: WrittenAnswer, writer: TextWriter) -> AsyncGenerator[TextPiece, None]:
        return self._echo(answer, writer) if self.echo else answer.pieces()

    async def _echo(self, answer: WrittenAnswer, writer: TextWriter) -> AsyncGenerator[TextPiece, None]:
        """Yield the prompts, each before its choices, and then these."""
        for place, prompt in enumerate(self._list_prompts()):
            text = prompt if isinstance(prompt, str) else writer.tokenizer.decode(prompt)
            for choice in range(self.choices):
                yield TextPiece(place * self.choices + choice, text)
        async for piece in answer.pieces():
            yield piece
