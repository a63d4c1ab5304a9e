"""A model that writes, as requests for text see it: prompts, lengths, and answers while they are written."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from tokenizers import Tokenizer

from laconic.errors import InputError
from laconic.runtimes.generator import EncoderInputs, Sampling
from serve.generation.generation_statistics import GenerationStatistics
from serve.generation.generation_worker import GenerationWorker
from serve.generation.token_stream import TokenEvents, TokenStream, WritingPhase, read_event
from serve.generation.written_choice import TextPiece, TokenLogprob, WrittenChoice, score_prompt
from serve.requests.public_errors import ContextOverflow


class RenderedChat(Protocol):
    """A chat template."""

    text: str

    @property
    def for_tools(self) -> "RenderedChat":
        """The template of chats with functions, which may be another."""

    @property
    def reads_tools(self) -> bool:
        """Whether the template says what functions there are."""

    @property
    def shown_call(self) -> str:
        """A call of `probe` as the template shows it, at the end of a chat; empty where it shows none."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a chat as text. prompt: add what begins the next answer. tools: functions that may be called. Raises
        InputError."""


class LengthSettings(Protocol):
    """What a checkpoint says of how its answers end."""

    @property
    def eos_token_id(self) -> tuple[int, ...]:
        """The tokens that end an answer."""

    @property
    def max_new_tokens(self) -> int:
        """The most tokens of an answer where a request names no number."""

    @property
    def repetition_penalty(self) -> float:
        """The repetition penalty where a request names none."""


@runtime_checkable
class TokenTask(Protocol):
    """What is asked of the task of every model that writes."""

    tokenizer: Tokenizer
    settings: LengthSettings
    vocabulary: int


@runtime_checkable
class WritingTask(TokenTask, Protocol):
    """What is asked of the task of a language model that writes."""

    chat: RenderedChat | None
    max_tokens: int


class WrittenAnswer:
    """The choices behind one prompt or several, while they are written; to be closed when nobody reads on.

    Choices are counted through: those of the second prompt follow those of the first.
    """

    def __init__(self, events: TokenEvents) -> None:
        self._events = events
        self._streams: dict[int, TokenStream] = {}
        self._choices: dict[tuple[int, int], WrittenChoice] = {}

    def add(self, stream: TokenStream, tokenizer: Tokenizer, stops: Sequence[str], shown: Mapping[int, str]) -> None:
        """Add the choices behind a prompt. stops, shown: as `WrittenChoice.begin` takes them."""
        request = stream.request
        self._streams[request.id] = stream
        for choice in range(request.sampling.n):
            made = WrittenChoice.begin(len(self._choices), tokenizer, request, stops, shown)
            self._choices[request.id, choice] = made

    @property
    def tokens(self) -> int:
        """The number of tokens written so far, in all choices."""
        return sum(choice.tokens for choice in self._choices.values())

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompts."""
        return sum(stream.request.read_tokens for stream in self._streams.values())

    @property
    def cached_tokens(self) -> int | None:
        """The number of these that a prefix cache had; None where the engine does not say."""
        counts = [stream.cached_tokens for stream in self._streams.values() if stream.cached_tokens is not None]
        return sum(counts) if counts else None

    async def pieces(self) -> AsyncGenerator[TextPiece, None]:
        """Yield what can be shown, as it comes, until every choice has ended. Raises what ends a request early."""
        while not all(choice.is_finished for choice in self._choices.values()):
            event = read_event(await self._events.get())
            choice = self._choices[event.request_id, event.choice]
            if choice.is_finished:  # by a stop string, while the engine was a step further
                continue
            piece = choice.add(event)
            if piece is None:
                continue
            if piece.finish_reason is not None:
                self._streams[event.request_id].cancel(event.choice)
            yield piece

    def score_prompt(self, index: int, tokenizer: Tokenizer) -> list[TokenLogprob]:
        """Return the tokens of the prompt before a choice that has begun, with their scores. index: among all."""
        for (request, _), choice in self._choices.items():
            if choice.index == index:
                return score_prompt(tokenizer, self._streams[request].request.prompt, choice.prompt_scores)
        raise IndexError(index)

    def forget(self, index: int) -> None:
        """Do not count what was written at a choice. index: among all."""
        for choice in self._choices.values():
            if choice.index == index:
                choice.tokens = 0

    def end(self, index: int) -> None:
        """Have the engine write no further at one choice. index: among all choices."""
        for (request, number), choice in self._choices.items():
            if choice.index == index:
                choice.is_finished = True
                self._streams[request].cancel(number)

    def close(self) -> None:
        """Have the engine write no further."""
        for stream in self._streams.values():
            stream.cancel()

    def list_phases(self) -> Iterator[WritingPhase]:
        """Yield what each request went through up to now."""
        for number, stream in self._streams.items():
            tokens = sum(choice.tokens for (request, _), choice in self._choices.items() if request == number)
            yield from stream.list_phases(tokens)


class TokenWriter:
    """Writes with one model. worker: its engine. task: its tokenizer and settings.

    adapter: the number of the LoRA adapter that it writes with; 0 for the model by itself. statistics: of its tokens.
    """

    def __init__(self, worker: GenerationWorker, task: TokenTask) -> None:
        self.worker = worker
        self.adapter = 0
        self.statistics = worker.statistics
        self.settings = task.settings
        self.vocabulary = task.vocabulary
        self.tokenizer = Tokenizer.from_str(task.tokenizer.to_str())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    async def begin(
        self,
        requests: Sequence[tuple[tuple[int, ...], EncoderInputs | None, Sampling]],
        *,
        timeout: float,
        key: str = "",
        stops: Sequence[str] = (),
        shown: Mapping[int, str] | None = None,
    ) -> WrittenAnswer:
        """Begin an answer to requests, each a prompt with what an encoder reads and its sampling, one after the other.
        timeout: seconds that each may wait for its turn. key: the name of whose they are. stops: strings that end a
        choice. shown: special tokens that are text. Raises what `GenerationWorker.begin` raises."""
        events: TokenEvents = asyncio.Queue()
        answer = WrittenAnswer(events)
        try:
            for prompt, source, sampling in requests:
                sampling = replace(sampling, stop_token_ids=tuple(self.settings.eos_token_id))
                stream = await self.worker.begin(
                    prompt, sampling, timeout, events, key, source, self.adapter, self.statistics
                )
                answer.add(stream, self.tokenizer, stops, shown or {})
        except BaseException:
            answer.close()
            raise
        return answer

    def close(self) -> None:
        """End the engine."""
        self.worker.close()


class TextWriter(TokenWriter):
    """Writes behind texts. context: the most tokens of a prompt with its answer. chat: the model's template."""

    scores_prompts: ClassVar[bool] = True
    """Whether the model gives the tokens of a prompt probabilities."""
    reads_images: ClassVar[bool] = False
    """Whether the messages of a chat may have images, and are rendered as lists of parts."""

    def __init__(
        self, worker: GenerationWorker, task: TokenTask, context: int, chat: RenderedChat | None = None
    ) -> None:
        super().__init__(worker, task)
        self.context = context
        self.chat = chat

    def adapt(self, adapter: int) -> "TextWriter":
        """Return a writer that writes with a LoRA adapter of the same engine, and counts its own tokens."""
        writer = copy(self)
        writer.adapter, writer.statistics = adapter, GenerationStatistics()
        return writer

    def require_chat(self) -> RenderedChat:
        """Return the chat template. Raises InputError where there is none."""
        if self.chat is None:
            raise InputError("the model has no chat template. Ask /v1/completions with a text")
        return self.chat

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[bytes] = (),
    ) -> tuple[int, ...]:
        """Encode a chat, with what begins the next answer. tools: functions that may be called. images: the content of
        image files, in the order of the chat. Raises InputError where there is no template, it refuses the chat, or the
        model does not read these images."""
        if images:
            raise InputError("the chat has an image, and the model reads texts alone. Send texts")
        return self.check(self.tokenizer.encode(self.render(messages, tools), add_special_tokens=False).ids)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Render a chat, with what begins the next answer. Raises InputError as `encode_chat`."""
        chat = self.require_chat()
        return (chat.for_tools if tools else chat).render(messages, prompt=True, tools=tools)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Encode a text that is to be continued. Raises InputError for one without tokens."""
        return self.check(self.tokenizer.encode(text).ids)

    def check(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a prompt. Raises InputError for none, and for such that the model does not have."""
        if not tokens:
            raise InputError("the prompt has no tokens, and the model needs one to begin with")
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.vocabulary:
            raise InputError(f"the tokens run from {low} to {high}, and the model takes 0 to {self.vocabulary - 1}")
        return tuple(tokens)

    def limit(self, prompt: Sequence[int], asked: int | None) -> int:
        """Return the most tokens of an answer. asked: by the request, if it does. Raises ContextOverflow where prompt
        and answer do not fit in the model's context: nothing is cut off."""
        room = self.context - len(prompt)
        if room < (asked or 1):
            wanted = f" and up to {asked} new ones" if asked else ""
            raise ContextOverflow(
                f"the model's context is {self.context} tokens, and the prompt has {len(prompt)}{wanted}. "
                f"Send a shorter prompt, or ask for fewer tokens"
            )
        return asked or min(room, self.settings.max_new_tokens)

    def divide(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], EncoderInputs | None]:
        """Return what the engine's text follows, and what an encoder reads."""
        return prompt, None

    async def write(
        self,
        prompts: Sequence[tuple[tuple[int, ...], Sampling]],
        stops: Sequence[str],
        *,
        timeout: float,
        key: str = "",
        shown: Mapping[int, str] | None = None,
    ) -> WrittenAnswer:
        """Begin an answer to prompts, each with its sampling; the rest as `begin` takes it."""
        requests = [(*self.divide(prompt), sampling) for prompt, sampling in prompts]
        return await self.begin(requests, timeout=timeout, key=key, stops=stops, shown=shown)
