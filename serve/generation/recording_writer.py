"""Models that write down what is said, part by part, while it is written."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, runtime_checkable

from laconic.arrays import Arrays
from laconic.runtimes.generator import EncoderInputs, Sampling
from serve.generation.generation_worker import GenerationWorker
from serve.generation.text_writer import TokenTask, TokenWriter, WrittenAnswer
from serve.generation.timed_window import SteppedRecording, TimedText, TimedTokens, TimedWindow, TimedWriting
from serve.generation.token_stream import TokenEvents, read_event
from serve.requests.offload import offload

AHEAD = 4
"""Parts of a recording that are written at once, so that they share the steps of the engine."""
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
"""The token of a language, by its code."""


@runtime_checkable
class SpeechTask(Protocol):
    """What is asked besides of the task of a model that writes down what is said."""

    def parse(self, value: Any) -> Any:
        """Make a sample of a recording. Raises InputError."""

    def encode_request(self, sample: Any) -> Arrays:
        """Return what the encoder reads of a sample."""

    def find_prefix(self, language: Any) -> tuple[int, ...]:
        """Find the tokens before a text in a language. Raises DataError."""

    def drop_times(self, text: str) -> str:
        """Return a text without the times in it."""

    @property
    def timed_settings(self) -> TimedWriting | None:
        """How a text with timestamps is written; None where the model has none."""

    def read_windows(self, parts: Sequence[Any]) -> SteppedRecording:
        """Read a recording that was divided as a whole. Raises InputError."""


class RecordingWriter(TokenWriter):
    """Writes down recordings."""

    def __init__(self, worker: GenerationWorker, task: TokenTask, recordings: SpeechTask) -> None:
        super().__init__(worker, task)
        self.task = recordings
        self.timed = recordings.timed_settings

    async def write(
        self, parts: Sequence[Any], *, prefix: tuple[int, ...], temperature: float, timeout: float, key: str = ""
    ) -> AsyncGenerator[tuple[int, str], None]:
        """Yield the text of parts piece by piece, each with the number of its part, one part after the other. parts: as
        the task takes them. prefix: the tokens before each text, where the model does not find them. timeout, key: as
        `begin` takes them."""
        sampling = self._sample(self.settings.max_new_tokens - len(prefix), temperature)
        waiting = deque(parts)
        answers: deque[asyncio.Task[WrittenAnswer]] = deque()
        try:
            for number in range(len(parts)):
                while waiting and len(answers) < AHEAD:
                    beginning = self._begin_part(waiting.popleft(), prefix, sampling, timeout, key)
                    answers.append(asyncio.create_task(beginning))
                async for text in self._read(await answers[0]):
                    yield number, text
                answers.popleft()
        finally:
            for answer in answers:
                answer.cancel()
                answer.add_done_callback(close_answer)

    async def _begin_part(
        self, part: Any, prefix: tuple[int, ...], sampling: Sampling, timeout: float, key: str
    ) -> WrittenAnswer:
        arrays = await offload(lambda: self.task.encode_request(self.task.parse(part)), long=True)
        source = EncoderInputs(arrays, self.worker.source_tokens)
        return await self.begin([(prefix, source, sampling)], timeout=timeout, key=key)

    async def _read(self, answer: WrittenAnswer) -> AsyncGenerator[str, None]:
        """Yield the text of a part, without white space around it."""
        async with aclosing(answer.pieces()) as pieces:
            async for text in strip_pieces(self.task.drop_times(piece.text) async for piece in pieces):
                yield text

    async def write_timed(
        self,
        recording: SteppedRecording,
        timed: TimedWriting,
        *,
        prefix: tuple[int, ...],
        temperature: float,
        timeout: float,
        key: str = "",
    ) -> AsyncGenerator[TimedText, None]:
        """Yield what is said in a recording, segment by segment: in windows, each of which begins where the last
        segment of the one before ends. timed: how the model writes. The others: as `write` takes them."""
        untimed = timed.timestamps.first - 1  # the token that says that an answer has no timestamps
        prompt = [token for token in prefix if token != untimed]
        start = 0
        while start < recording.steps:
            window = TimedWindow(timed.timestamps.first, recording.count_steps(start))
            sampling = self._sample(timed.max_new_tokens - len(prompt), temperature, timestamps=True)
            arrays = await offload(self._encode_window, recording, start, long=True)
            source = EncoderInputs(arrays, self.worker.source_tokens)
            heard: list[int] = []  # the language, and what else is in front of the text
            async with aclosing(self._read_tokens(tuple(prompt), source, sampling, timeout, key)) as tokens:
                async for token in tokens:
                    if len(prompt) + len(heard) < timed.begin:
                        heard.append(token)
                    elif (segment := window.add(token)) is not None:
                        yield self._place(segment, start, recording.step_seconds, [*prompt, *heard])
            prompt += heard
            last, step = window.finish()
            if last is not None:
                yield self._place(last, start, recording.step_seconds, prompt)
            start += max(1, step)

    async def _read_tokens(
        self, prompt: tuple[int, ...], source: EncoderInputs, sampling: Sampling, timeout: float, key: str
    ) -> AsyncGenerator[int, None]:
        """Yield the tokens of one answer, without the last one that ends it."""
        events: TokenEvents = asyncio.Queue()
        stream = await self.worker.begin(prompt, sampling, timeout, events, key, source)
        try:
            while True:
                event = read_event(await events.get())
                for token in event.token_ids:
                    if token not in sampling.stop_token_ids:
                        yield token
                if event.finish_reason is not None:
                    return
        finally:
            stream.cancel()

    def _sample(self, tokens: int, temperature: float, *, timestamps: bool = False) -> Sampling:
        return Sampling(
            tokens,
            temperature,
            repetition_penalty=self.settings.repetition_penalty,
            stop_token_ids=tuple(self.settings.eos_token_id),
            timestamps=timestamps,
        )

    def _encode_window(self, recording: SteppedRecording, start: int) -> Arrays:
        return self.task.encode_request(recording.cut(start))

    def _place(self, segment: TimedTokens, start: int, step: float, prompt: Sequence[int]) -> TimedText:
        """Return a segment as a text of the whole recording. start: of its window. step: in seconds."""
        names = (LANGUAGE.fullmatch(self.tokenizer.id_to_token(each) or "") for each in prompt)
        language = next((name[1] for name in names if name), "")
        text = str(self.tokenizer.decode(segment.tokens, skip_special_tokens=True))
        return TimedText((start + segment.start) * step, (start + segment.end) * step, text, language)


async def strip_pieces(pieces: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """Yield the pieces of a text without the white space around it."""
    is_begun, held = False, ""
    async for piece in pieces:
        text = held + piece
        text = text if is_begun else text.lstrip()
        shown = text.rstrip()
        held = text[len(shown) :]
        if shown:
            is_begun = True
            yield shown


def close_answer(answer: "asyncio.Task[WrittenAnswer]") -> None:
    """End an answer that nobody reads."""
    if not answer.cancelled() and answer.exception() is None:
        answer.result().close()
