"""Models that write down what is said, part by part, while it is written."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, runtime_checkable

from laconic.arrays import Arrays
from laconic.runtimes.generator import EncoderInputs, Sampling
from serve.generation.generation_worker import GenerationWorker
from serve.generation.text_writer import TokenTask, TokenWriter, WrittenAnswer
from serve.requests.offload import offload

AHEAD = 4
"""Parts of a recording that are written at once, so that they share the steps of the engine."""


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


class RecordingWriter(TokenWriter):
    """Writes down recordings."""

    def __init__(self, worker: GenerationWorker, task: TokenTask, recordings: SpeechTask) -> None:
        super().__init__(worker, task)
        self.task = recordings

    async def write(
        self, parts: Sequence[Any], *, prefix: tuple[int, ...], temperature: float, timeout: float, key: str = ""
    ) -> AsyncGenerator[tuple[int, str], None]:
        """Yield the text of parts piece by piece, each with the number of its part, one part after the other. parts: as
        the task takes them. prefix: the tokens before each text, where the model does not find them. timeout, key: as
        `begin` takes them."""
        sampling = Sampling(self.settings.max_new_tokens - len(prefix), temperature)
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
        is_begun, held = False, ""
        async for piece in answer.pieces():
            text = held + self.task.drop_times(piece.text)
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
