"""Requests of `POST /v1/completions`."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import Field

from serve.generation.text_writer import TextWriter, WrittenAnswer
from serve.generation.written_choice import TextPiece
from serve.openai.text_request import TextRequest, refuse
from serve.requests.public_errors import InvalidParameter


class CompletionRequest(TextRequest):
    """Texts, or the ids of their tokens, that are to be continued."""

    prompt_field = "prompt"

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.max_tokens == 0 and not self.scores_prompt:
            raise InvalidParameter("max_tokens", "'max_tokens' is 0 for 'echo' with 'logprobs' alone")
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
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.has_logprobs

    @property
    def most_tokens(self) -> int | None:
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def prompts(self) -> int:
        return len(self._list_prompts())

    def _list_prompts(self) -> Sequence[Any]:
        """Return the prompts, each a text or ids of tokens."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]

    def encode_prompts(self, writer: TextWriter) -> Sequence[tuple[int, ...]]:
        if self.scores_prompt and not writer.scores_prompts:
            refuse("echo", True, "the model reads its prompt with an encoder, and does not score it")
        return [
            writer.encode_text(prompt) if isinstance(prompt, str) else writer.check(prompt)
            for prompt in self._list_prompts()
        ]

    def read_pieces(self, answer: WrittenAnswer, writer: TextWriter) -> AsyncGenerator[TextPiece, None]:
        return self._echo(answer, writer) if self.echo else answer.pieces()

    async def _echo(self, answer: WrittenAnswer, writer: TextWriter) -> AsyncGenerator[TextPiece, None]:
        """Yield the prompts, each before its choices, with its scores once they are known."""
        texts = [
            prompt if isinstance(prompt, str) else writer.tokenizer.decode(prompt)
            for prompt in self._list_prompts()
            for _ in range(self.choices)
        ]
        if not self.scores_prompt:
            for index, text in enumerate(texts):
                yield TextPiece(index, text)
        begun: set[int] = set()
        async for piece in answer.pieces():
            if self.scores_prompt:
                index, start = piece.choice, len(texts[piece.choice])
                if index not in begun:
                    begun.add(index)
                    yield TextPiece(index, texts[index], answer.score_prompt(index, writer.tokenizer))
                piece = piece.shift(start)
                if self.max_tokens == 0:
                    answer.forget(index)
                    piece = TextPiece(index, "", finish_reason="length")
            yield piece
