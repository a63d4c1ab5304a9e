"""A worker that writes what a test says, in place of an engine: its events are those of an engine that works."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from served import Running

from laconic.runtimes.generator import EncoderInputs, GenerationRequest, Sampling, TokenEvent
from serve.generation.text_writer import TextWriter
from serve.generation.token_stream import TokenEvents, TokenStream

END = 1
"""The token that ends an answer of the chat model."""


class ScriptedWorker:
    """Writes `write(prompt, choice)` token by token, with logprobs -0.25 and of likeliest tokens -0.5, -1.5 ....

    is_silent: whether nothing is written. requests: those that have come. cancelled: the choices that were ended from
    outside, by request. prompts are texts here. Whatever else is asked of it, `worker` answers.
    """

    def __init__(self, writer: TextWriter, write: Callable[[str, int], str]) -> None:
        self.worker = writer.worker
        self.tokenizer = writer.tokenizer
        self.write = write
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[tuple[int, int | None]] = []
        self.is_silent = False
        self._ids = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    async def begin(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        timeout: float,
        events: TokenEvents,
        key: str = "",
        source: EncoderInputs | None = None,
        adapter: int = 0,
        statistics: Any = None,
    ) -> TokenStream:
        request = GenerationRequest(next(self._ids), prompt, sampling, source, adapter)
        self.requests.append(request)
        stream = TokenStream(request, lambda *ended: self.cancelled.append(ended), events, statistics)
        if self.is_silent:
            return stream
        text = self.tokenizer.decode(list(prompt), skip_special_tokens=False)
        scripts = [self._script(request, choice, self.write(text, choice)) for choice in range(sampling.n)]
        for step in itertools.zip_longest(*scripts):  # choices are written side by side
            for event in filter(None, step):
                stream.put(event)
        return stream

    def _script(self, request: GenerationRequest, choice: int, text: str) -> list[TokenEvent]:
        sampling = request.sampling
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False).ids, END][: sampling.max_new_tokens]
        likeliest = tuple((5 + index, -0.5 - index) for index in range(sampling.top_logprobs))
        reasons = [None] * (len(tokens) - 1) + ["stop" if tokens[-1] == END else "length"]
        return [
            TokenEvent(
                request.id,
                choice,
                (token,),
                (-0.25,) if sampling.logprobs else (),
                reason,
                (likeliest,) if likeliest else (),
            )
            for token, reason in zip(tokens, reasons, strict=True)
        ]


@contextmanager
def scripted(server: Running, write: Callable[[str, int], str] | str, model: str = "chat") -> Iterator[ScriptedWorker]:
    """Have a model of a server write this, whoever asks, and read prompts of any length."""
    writer = server.app.repository.get(model).writer
    assert writer is not None
    before: Any = writer.worker
    context, writer.context = writer.context, 1 << 16
    worker: Any = ScriptedWorker(writer, write if callable(write) else lambda prompt, choice: write)
    writer.worker = worker
    try:
        yield worker
    finally:
        writer.worker, writer.context = before, context
