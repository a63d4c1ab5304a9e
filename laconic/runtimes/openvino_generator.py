"""OpenVINO's two engines that write, of which each request gets the one that can."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from laconic.runtimes.generator import GenerationRequest, Generator, TokenEvent
from laconic.runtimes.openvino_decoder import OpenVinoDecoder
from laconic.runtimes.openvino_genai import OpenVinoGenAi
from laconic.runtimes.runtime import Compute
from laconic.runtimes.stateful_graph import PagingRefused


class OpenVinoGenerator(Generator):
    """Paged attention, where the model's can be paged and the request does not need all scores; else a decoder that is
    stepped here, of which the first such request opens a second copy."""

    def __init__(
        self,
        model: Path,
        *,
        context: int,
        cache_bytes: int,
        threads: int = 1,
        compute: Compute = "float32",
        tokenizer: Path | None = None,
    ) -> None:
        """model: a decoder with a cache, in ONNX. context: the most tokens that it takes. cache_bytes: of the cache of
        all requests, for each of the two. tokenizer: its file, for grammars. Raises RuntimeFailure."""
        self._paged: OpenVinoGenAi | None = None
        with suppress(PagingRefused):
            self._paged = OpenVinoGenAi(
                model, context=context, cache_bytes=cache_bytes, threads=threads, compute=compute
            )
        self._decoder = OpenVinoDecoder(
            model,
            context=context,
            cache_bytes=cache_bytes,
            threads=threads,
            compute=compute,
            tokenizer=tokenizer,
            beside=self._paged,
        )
        self._engines = [engine for engine in (self._paged, self._decoder) if engine is not None]
        self.ledger = self._decoder.ledger

    def add(self, request: GenerationRequest) -> None:
        engine = self._decoder if self._paged is None or request.sampling.needs_logits else self._paged
        engine.add(request)

    def step(self) -> Sequence[TokenEvent]:
        return [event for engine in self._engines if not engine.is_idle for event in engine.step()]

    def cancel(self, request_id: int, choice: int | None = None) -> None:
        for engine in self._engines:
            engine.cancel(request_id, choice)

    @property
    def is_idle(self) -> bool:
        return all(engine.is_idle for engine in self._engines)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
