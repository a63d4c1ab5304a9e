"""The interface of an engine that writes (generator): requests in, token events out, until each request ends."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from laconic.arrays import Array
from laconic.errors import InputError, Overloaded

FinishReason = Literal["stop", "length", "cancelled", "failed"]
"""Why a choice ended: at a stop token, at the most tokens that were asked for, because it was cancelled, or because the
engine that it needs cannot be opened."""
PIECE = 256
"""Tokens of prompts that a step reads while no text is written."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when a choice ends.

    max_new_tokens: the most tokens of a choice, its stop token included. temperature: 0 takes the likeliest token.
    top_p, top_k, min_p: what a token is drawn from; top_k 0 is all tokens. repetition_penalty: of tokens in the prompt
    or the choice (Keskar et al., 2019). frequency_penalty: taken from the score of a token as often as the choice has
    it; presence_penalty: once, if it has it. logit_bias: added to the scores of tokens. seed: the same seed draws the
    same tokens; choice i of `n` draws with seed + i. stop_token_ids: a choice ends with any of these. logprobs: whether
    events hold the logarithm of the probability that the model gave each token; top_logprobs: of how many of the
    likeliest tokens too. prompt_logprobs: whether there are such of the prompt's tokens too. grammar: what the choice's
    text must match, a grammar of llguidance; empty without one. timestamps: whether the text is written with those of a
    model of speech.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    grammar: str = ""
    timestamps: bool = False

    @property
    def needs_logits(self) -> bool:
        """Whether tokens are chosen in a way that takes all of the model's scores, which some engines keep inside."""
        scored = self.top_logprobs or self.prompt_logprobs
        return bool(self.frequency_penalty or self.presence_penalty or self.logit_bias or scored or self.grammar)


@dataclass(frozen=True)
class EncoderInputs:
    """What the encoder of an encoder-decoder reads, or the tower of a vision-language model. arrays: its inputs by
    name, of one sample, [1, ...]. tokens: the tokens that it takes in the cache; 0 for images, whose patches are in the
    prompt."""

    arrays: Mapping[str, Array]
    tokens: int


@dataclass(frozen=True)
class GenerationRequest:
    """What is to be written. id: of the caller's choice, unique among the requests under way. prompt: the tokens that
    the text follows; with a source, they may be none. adapter: the number that it was loaded under; 0 for the model
    alone."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    source: EncoderInputs | None = None
    adapter: int = 0

    @property
    def read_tokens(self) -> int:
        """The number of tokens that the model reads: those of the source and of the prompt."""
        return len(self.prompt) + (0 if self.source is None else self.source.tokens)

    @property
    def length(self) -> int:
        """The most tokens that one choice has in the cache."""
        return self.read_tokens + self.sampling.max_new_tokens


@dataclass(frozen=True)
class GoldenToken:
    """The likeliest token behind a prompt, and the source of an encoder-decoder."""

    prompt: tuple[int, ...]
    token: int
    source: EncoderInputs | None = None


@dataclass(frozen=True)
class TokenEvent:
    """The tokens that one step added to one choice of a request. logprobs: of each, where they were asked for;
    top_logprobs: of each, the likeliest tokens with theirs, likeliest first. finish_reason: None unless these are the
    choice's last. error: why it failed, if it did. prompt_scores: with the first of a choice, where they were asked
    for: of each token of the prompt behind the first, its logprob and the likeliest tokens. cached_tokens: with the
    first event of a request: tokens of its prompt that a prefix cache had; None where the engine does not say.
    drafted: tokens that were proposed for this step; accepted: those of them that were chosen."""

    request_id: int
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    error: str = ""
    prompt_scores: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()
    cached_tokens: int | None = None
    drafted: int = 0
    accepted: int = 0


def check_prompt(request: GenerationRequest, vocabulary: int, patches: int = 0) -> None:
    """Raise InputError for a prompt without tokens, or with such that the model does not have: an engine would read
    what lies beside the embeddings. patches: of its images, whose ids are -1, -2, ..."""
    if not request.prompt:
        if request.source is not None:
            return
        raise InputError("the prompt has no tokens")
    low, high = min(request.prompt), max(request.prompt)
    if low < -patches or high >= vocabulary:
        raise InputError(f"the tokens run from {low} to {high}, and the model takes {-patches} to {vocabulary - 1}")


def check_length(request: GenerationRequest, context: int) -> None:
    """Raise InputError for a prompt and an answer that are longer than the model's context, in tokens."""
    if len(request.prompt) + request.sampling.max_new_tokens > context:
        raise InputError(f"the prompt and its answer are longer than the model's context of {context} tokens")


class UnreadPrompt(Protocol):
    """A prompt that is read in pieces. read: tokens that were. left: tokens that were not."""

    read: int

    @property
    def left(self) -> int: ...


PromptT = TypeVar("PromptT", bound=UnreadPrompt)


def order_prompts(prompts: Iterable[PromptT], step: int) -> list[PromptT]:
    """Order prompts for a step that reads pieces of them: as they came, but in every second step those with the fewest
    tokens left first. So a short prompt waits for no long one, which still gets half of what is read. The first keeps
    its turn until it has begun, since it may wait for room. step: its number."""
    ordered = list(prompts)
    if step % 2 and ordered and ordered[0].read:
        ordered.sort(key=lambda prompt: prompt.left)
    return ordered


Holder = tuple[int, int]
"""What blocks are held for: a choice, by its request and its index."""


class BlockLedger:
    """The blocks of a cache, and the choices that hold them. A choice holds all blocks that it may need, from its
    beginning to its end, so that none ever waits for another in the middle of its text.

    total: blocks. block_tokens: tokens of a block.
    """

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self.used = 0
        self._held: dict[Holder, int] = {}

    def count(self, request: GenerationRequest) -> int:
        """Return the blocks that one choice of a request holds."""
        return -(-request.length // self.block_tokens)

    def check(self, request: GenerationRequest) -> None:
        """Raise InputError for a request that needs more blocks than there are."""
        if self.count(request) * request.sampling.n > self.total:
            choices = f" for each of {request.sampling.n} choices" if request.sampling.n > 1 else ""
            raise InputError(
                f"a prompt of {request.read_tokens} tokens and up to {request.sampling.max_new_tokens} new ones"
                f"{choices} exceed the cache of {self.total * self.block_tokens} tokens. Ask for fewer tokens"
            )

    def has_room(self, request: GenerationRequest) -> bool:
        """Return whether the blocks of a request are free."""
        return self.used + self.count(request) * request.sampling.n <= self.total

    def hold(self, request: GenerationRequest) -> None:
        """Hold the blocks of all choices of a request. Raises InputError, and Overloaded where they are not free."""
        self.check(request)
        if not self.has_room(request):
            raise Overloaded("the cache is full: other requests hold its blocks. Try again later")
        for choice in range(request.sampling.n):
            self._held[request.id, choice] = self.count(request)
            self.used += self.count(request)

    def release(self, request_id: int, choice: int) -> None:
        """Release the blocks of a choice, if it holds any."""
        self.used -= self._held.pop((request_id, choice), 0)


class Generator(ABC):
    """A loaded model that writes. All calls come from one thread.

    ledger: the capacity in blocks, and what holds them. source_tokens: that every source takes in the cache where all
    have one length; 0 where each has its own, or there are none. piece: tokens of a prompt that a step reads beside
    texts that are written, whose next tokens come after it (`benchmarks/long_prompts.py`). beside: tokens of all
    prompts that it reads there, a piece of each: by one piece a step, 16 prompts of 64 tokens that came at once were
    answered at 103 tokens/s by paged attention, and so at 152 (`benchmarks/generation.py`). gives_scores: whether
    `top_logprobs` can be asked for. note: what should be known about how the model was opened.
    """

    ledger: BlockLedger
    source_tokens: int = 0
    piece: int = 32
    beside: int = 128
    gives_scores: bool = True
    note: str = ""

    @abstractmethod
    def add(self, request: GenerationRequest) -> None:
        """Begin a request. Raises InputError for one that can never run, Overloaded where its blocks are not free."""

    @abstractmethod
    def step(self) -> Sequence[TokenEvent]:
        """Write the next token of the choices under way; return what was added and what ended. Prompts are read in
        pieces, so a step may add nothing. Raises RuntimeFailure, after which the generator is of no further use."""

    @abstractmethod
    def cancel(self, request_id: int, choice: int | None = None) -> None:
        """End a choice of a request, or all of them. An event of the next step says so, after which their blocks are
        free; what is not under way is left alone."""

    def limit_reading(self, *, writes: bool) -> tuple[int, int]:
        """Return how many tokens of prompts a step may read, and how many of one. writes: whether texts are written."""
        return (self.beside, self.piece) if writes else (PIECE, PIECE)

    def load_adapter(self, number: int, folder: Path) -> None:
        """Load a LoRA adapter, which requests name by its number: above 0, and never given before. Raises SourceError
        for an adapter that is not this model's, and InputError where the engine was not opened for any."""
        raise InputError("the engine was not opened for adapters")

    def unload_adapter(self, number: int) -> None:  # noqa: B027 - of an engine without adapters there is none
        """Let no request begin with an adapter any more; those under way end with it."""

    def compute_logits(self, ids: Array, adapter: int = 0) -> Array:
        """Compute the logits behind every token of texts, [rows, tokens, vocabulary] float32, as requests with an
        adapter do; the next call overwrites them. ids: [rows, tokens]. Raises InputError as `load_adapter` does."""
        raise InputError("the engine was not opened for adapters")

    def load_prefixes(self, path: Path, model: str) -> None:  # noqa: B027 - not every engine's cache can be read
        """Go on with the prefix cache that `save_prefixes` of an engine of the same model wrote to a file, if there is
        one. model: its digest."""

    def save_prefixes(self) -> None:  # noqa: B027 - as above
        """Write the prefix cache to the file of `load_prefixes`."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing is under way, so that a step would do nothing."""

    def close(self) -> None:  # noqa: B027 - an engine without resources to release need not override it
        """Release the memory. The generator cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
