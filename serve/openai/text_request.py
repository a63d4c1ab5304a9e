"""Requests for text in OpenAI's API: their fields, each checked, and what becomes of them."""

import secrets
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from laconic.errors import InputError, SourceError
from laconic.runtimes.generator import Sampling
from serve.generation.written_choice import TextPiece
from serve.openai.request_body import RequestBody, RequestPart
from serve.requests.public_errors import InvalidParameter

if TYPE_CHECKING:
    from serve.generation.text_writer import TextWriter, WrittenAnswer

SEEDS = 1 << 32
"""The number of seeds that draw differently."""

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(RequestPart):
    """What a stream holds beside the text."""

    include_usage: bool | None = None


class TextRequest(RequestBody):
    """The fields that requests for text have in common."""

    prompt_field: ClassVar[str]
    """The field that holds the prompt."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logit_bias: dict[TokenId, Bias] | None = None
    user: str | None = None

    def refuse_unsupported(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", "'stream_options' are for streams alone. Set 'stream'")

    @property
    def choices(self) -> int:
        """The number of choices."""
        return self.n or 1

    @property
    def stops(self) -> Sequence[str]:
        """The strings that end a choice."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer holds the probabilities of its tokens."""
        return False

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer holds the probabilities of the prompt's tokens too."""
        return False

    @property
    def likeliest(self) -> int:
        """The number of likeliest tokens whose probabilities the answer holds beside those of its own."""
        return 0

    @property
    def has_calls(self) -> bool:
        """Whether the answer may call functions."""
        return False

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that the request asks for; None where it does not say."""
        return self.max_tokens

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return 1

    def prepare(self, writer: "TextWriter") -> Sequence[tuple[tuple[int, ...], Sampling]]:
        """Return the prompts, each with how the answer to it is written. Raises InvalidParameter, ContextOverflow where
        one does not fit in the model's context."""
        try:
            prompts = self.encode_prompts(writer)
        except InvalidParameter:
            raise
        except (InputError, SourceError) as error:
            raise InvalidParameter(self.prompt_field, str(error)) from None
        grammar = self.make_grammar(writer)
        return [(prompt, self._make_sampling(writer, prompt, grammar)) for prompt in prompts]

    @abstractmethod
    def encode_prompts(self, writer: "TextWriter") -> Sequence[tuple[int, ...]]:
        """Encode the prompts. Raises InputError."""

    def make_grammar(self, writer: "TextWriter") -> str:
        """Return the grammar of the answer; empty where any text will do. Raises InvalidParameter."""
        return ""

    def find_shown(self, writer: "TextWriter") -> Mapping[int, str]:
        """Return the special tokens that are read as text."""
        return {}

    def read_pieces(self, answer: "WrittenAnswer", writer: "TextWriter") -> AsyncGenerator[TextPiece, None]:
        """Return what is shown of an answer, as it comes."""
        return answer.pieces()

    def _make_sampling(self, writer: "TextWriter", prompt: Sequence[int], grammar: str) -> Sampling:
        return Sampling(
            max_new_tokens=writer.limit(prompt, self.most_tokens),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or writer.settings.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=self._read_bias(writer.vocabulary),
            seed=secrets.randbelow(SEEDS) if self.seed is None else self.seed % SEEDS,
            n=self.choices,
            logprobs=self.has_logprobs,
            top_logprobs=self.likeliest,
            prompt_logprobs=self.scores_prompt,
            grammar=grammar,
        )

    def _read_bias(self, vocabulary: int) -> tuple[tuple[int, float], ...]:
        """Return the biases by token. Raises InvalidParameter for tokens that the model does not have."""
        biases = tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())
        if unknown := [token for token, _ in biases if token >= vocabulary]:
            raise InvalidParameter(
                "logit_bias", f"'logit_bias' names token {unknown[0]}, and the model takes 0 to {vocabulary - 1}"
            )
        return biases


def refuse(name: str, value: object, reason: str) -> None:
    """Raise InvalidParameter for a field that this server does not serve, unless it asks for nothing."""
    if value:
        raise InvalidParameter(name, f"{name!r} is not supported: {reason}")
