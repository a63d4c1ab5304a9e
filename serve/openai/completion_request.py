"""Requests of `POST /v1/completions`."""

from typing import Any

from pydantic import Field

from serve.generation.text_writer import TextWriter
from serve.openai.text_request import TextRequest, refuse


class CompletionRequest(TextRequest):
    """A text, or the ids of its tokens, that is to be continued."""

    prompt_field = "prompt"

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        refuse("echo", self.echo, "the prompt is not scored")
        refuse("suffix", self.suffix, "the model continues texts")
        if self.best_of not in (None, self.choices):
            refuse("best_of", True, "no choice is left out. Use 'n'")
        if isinstance(self.prompt, list) and len(self.prompt) > 1 and not isinstance(self.prompt[0], int):
            refuse("prompt", True, "a request has one prompt. Send several requests; they are written together")

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def likeliest(self) -> int:
        return self.logprobs or 0

    def encode_prompt(self, writer: TextWriter) -> tuple[int, ...]:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            (prompt,) = prompt
        return writer.encode_text(prompt) if isinstance(prompt, str) else writer.check(prompt)
