"""OpenVINO's two engines that write, of which each request gets the one that can."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.arrays import Array
from laconic.errors import RuntimeFailure
from laconic.runtimes.draft_file import DraftFile
from laconic.runtimes.generator import GenerationRequest, Generator, GoldenToken, TokenEvent
from laconic.runtimes.openvino_decoder import OpenVinoDecoder
from laconic.runtimes.openvino_genai import OpenVinoGenAi
from laconic.runtimes.runtime import Compute
from laconic.runtimes.stateful_graph import PagingRefused
from laconic.runtimes.token_proof import count_differing, may_differ
from laconic.tasks.generation_settings import GenerationSettings


class OpenVinoGenerator(Generator):
    """Paged attention, where the model's can be paged and the request does not need all scores; else a decoder that is
    stepped here, of which the first such request opens a second copy. A text that begins alone is stepped, too, where
    that was faster with a draft model."""

    def __init__(
        self,
        model: Path,
        *,
        context: int,
        cache_bytes: int,
        threads: int = 1,
        compute: Compute = "float32",
        tokenizer: Path | None = None,
        generation: Mapping[str, Any] | None = None,
        longest: int = 0,
        golden: Sequence[GoldenToken] = (),
        has_adapters: bool = False,
        draft: DraftFile | None = None,
    ) -> None:
        """model: a decoder with a cache, in ONNX. context: the most tokens that it takes. cache_bytes: of the cache of
        all requests, for each of the two. tokenizer: its file, for grammars. generation, longest: of an
        encoder-decoder, as `OpenVinoDecoder` takes them, the settings as in their file. golden: what the model must
        write; an engine that does not is not used. has_adapters: whether adapters can be loaded; then the engine that
        is stepped writes everything, with adapters and without. draft: of a model that drafts the tokens of a text
        that is written alone. Raises RuntimeFailure."""
        options: dict[str, Any] = {
            "context": context,
            "cache_bytes": cache_bytes,
            "threads": threads,
            "compute": compute,
        }
        parsed = None if generation is None else GenerationSettings.model_validate(generation)
        if has_adapters:
            self.note = "adapters can be loaded, so that the engine that is stepped writes everything"
        self._paged = self._open_paged(model, golden, options) if parsed is None and not has_adapters else None
        self._decoder = OpenVinoDecoder(
            model,
            **options,
            tokenizer=tokenizer,
            beside=self._paged,
            generation=parsed,
            longest=longest,
            has_adapters=has_adapters,
            draft=draft,
        )
        self._is_alone_stepped = draft is not None and draft.beats_paged
        if self._paged is None and (wrong := count_differing(self._decoder, golden)) > may_differ(golden):
            raise RuntimeFailure(
                f"OpenVINO computes {model.name} wrongly on this machine: {wrong} of {len(golden)} golden tokens differ"
            )
        self._engines = [engine for engine in (self._paged, self._decoder) if engine is not None]
        self.ledger = self._decoder.ledger
        self.source_tokens = self._decoder.source_tokens

    def _open_paged(
        self, model: Path, golden: Sequence[GoldenToken], options: Mapping[str, Any]
    ) -> OpenVinoGenAi | None:
        """Open the engine with paged attention; None where it takes no such graph, or differs on the golden tokens."""
        try:
            paged = OpenVinoGenAi(model, **options)
        except PagingRefused:
            return None
        if (wrong := count_differing(paged, golden)) <= may_differ(golden):
            return paged
        self.note = f"{wrong} of {len(golden)} golden tokens differ with paged attention, which is not used"
        paged.close()
        return None

    def add(self, request: GenerationRequest) -> None:
        is_stepped = self._paged is None or request.sampling.needs_logits or self._is_drafted(request)
        engine = self._decoder if is_stepped or self._paged is None else self._paged
        engine.add(request)

    def _is_drafted(self, request: GenerationRequest) -> bool:
        """Return whether a request is the only one, and comes faster with the draft model."""
        return self._is_alone_stepped and self.is_idle and self._decoder.can_draft(request)

    def load_adapter(self, number: int, folder: Path) -> None:
        self._decoder.load_adapter(number, folder)

    def unload_adapter(self, number: int) -> None:
        self._decoder.unload_adapter(number)

    def compute_logits(self, ids: Array, adapter: int = 0) -> Array:
        return self._decoder.compute_logits(ids, adapter)

    def load_prefixes(self, path: Path, model: str) -> None:
        self._decoder.load_prefixes(path, model)

    def save_prefixes(self) -> None:
        self._decoder.save_prefixes()

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
