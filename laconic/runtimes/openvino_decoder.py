"""OpenVINO on the CPU, a token a step, or several that were drafted: rows are batched and tokens chosen here, so that
any attention, any setting of sampling and encoder-decoders can be served; the cache is copied as rows join and leave,
and its free part holds prefixes of texts that were read."""

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from laconic.arrays import Array
from laconic.errors import InputError, RuntimeFailure, describe_error
from laconic.runtimes.decoder_opening import OpenDecoder, begin_opening
from laconic.runtimes.decoder_requests import NO_SOURCE
from laconic.runtimes.decoder_rows import DecoderRow, JoiningRow, PromptReading, make_rows
from laconic.runtimes.draft_file import DraftFile
from laconic.runtimes.generator import (
    BlockLedger,
    FinishReason,
    GenerationRequest,
    Generator,
    TokenEvent,
    check_length,
    order_prompts,
)
from laconic.runtimes.grammar import GrammarTokens, begin_match
from laconic.runtimes.low_rank_adapter import LowRankAdapter, read_low_rank_adapter
from laconic.runtimes.openvino_genai import OpenVinoGenAi
from laconic.runtimes.prefix_cache import PrefixCache
from laconic.runtimes.prefix_file import PrefixFile
from laconic.runtimes.runtime import Compute
from laconic.runtimes.source_encoder import SourceEncoder, check_source
from laconic.runtimes.token_chooser import check_sampling
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.timed_settings import TimedSettings

BLOCK_TOKENS = 32
"""Tokens of a block of the ledger, and of prefixes; the cache of the rows has none."""
COPIES = 4
"""How many times the cache is in memory: each step writes it anew, with room to grow; the engine keeps a copy of its
own; and rows join (SmolLM2-135M, 8 rows of 490 tokens: 3.2 times, and 4.8 for a moment)."""
LEAST_COST = 32
"""A piece of a prompt takes the time of so many tokens at least: the model's weights are read once."""
PAUSE = 0.002
"""Seconds that a step lasts while the model is being opened."""


class OpenVinoDecoder(Generator):
    """A decoder whose rows are batched here, the ends of their texts side by side.

    A request begins, first come first served, when all rows padded to the longest that any may become fit in the cache.
    """

    def __init__(
        self,
        model: Path,
        *,
        context: int,
        cache_bytes: int,
        threads: int = 1,
        compute: Compute = "float32",
        tokenizer: Path | None = None,
        beside: OpenVinoGenAi | None = None,
        generation: GenerationSettings | None = None,
        longest: int = 0,
        has_adapters: bool = False,
        draft: DraftFile | None = None,
    ) -> None:
        """model: a decoder with a cache, in ONNX. context: the most tokens that it takes. cache_bytes: of the cache of
        all requests. tokenizer: its file, for grammars. beside: the engine that writes other requests with this model,
        whose ledger counts these too; the model is then opened in the background, for the first request. generation:
        of an encoder-decoder, whose encoder lies beside the model; longest: the most tokens of its source.
        has_adapters: whether adapters can be loaded. draft: of a model that drafts the tokens of a text that is alone.
        Raises RuntimeFailure where a graph or the engine refuses."""
        self.context = context
        self._generation = generation and generation.model_copy(update={"repetition_penalty": 1.0})
        self._timed = self._generation and TimedSettings.add_to(self._generation)
        self._start = () if generation is None else (generation.decoder_start_token_id,)
        self._encoder: SourceEncoder | None = None
        self._adapters: dict[int, LowRankAdapter] = {}
        source = None if generation is None else longest
        self._begin_opening = partial(begin_opening, model, context, threads, compute, source, has_adapters, draft)
        self._opening = self._begin_opening() if beside is None or (draft and draft.beats_paged) else None
        if beside is None and self._opening is not None:
            decoder = self._opening.result()
            token_bytes, self.vocabulary = decoder.token_bytes, decoder.vocabulary
            self._encoder = decoder.encoder
            self.source_tokens = 0 if decoder.encoder is None else decoder.encoder.tokens
        elif beside is not None:
            token_bytes, self.vocabulary = beside.cache.count_bytes(4), beside.vocabulary
        self._capacity = BlockLedger(cache_bytes // (COPIES * BLOCK_TOKENS * token_bytes), BLOCK_TOKENS)
        if not self._capacity.total and beside is None:
            raise RuntimeFailure(f"the cache of {cache_bytes} bytes holds no block of {BLOCK_TOKENS} tokens of {model}")
        self.ledger = self._capacity if beside is None else beside.ledger
        self._prefixes = PrefixCache(BLOCK_TOKENS)
        self._file: PrefixFile | None = None
        self._grammars = None if tokenizer is None else GrammarTokens(tokenizer, self.vocabulary)
        self._prompts: list[PromptReading] = []
        self._steps = 0
        self._rows: list[DecoderRow] = []
        self._past: list[Array] = []
        self._sources: Mapping[str, Array] = NO_SOURCE
        self._joining: list[JoiningRow] = []

    def add(self, request: GenerationRequest) -> None:
        check_source(request, self._encoder, self.vocabulary, is_required=self._generation is not None)
        sampling = request.sampling
        check_sampling(sampling, self.vocabulary)
        check_length(request, self.context)
        if sampling.timestamps and self._timed is None:
            raise InputError("the model has no tokens for timestamps. Ask for a text without them")
        if request.adapter and request.adapter not in self._adapters:
            raise InputError("the adapter is not loaded any more. Ask for another model")
        settings = self._timed if sampling.timestamps else self._generation
        self._capacity.check(request)
        match = begin_match(self._grammars, sampling.grammar, sampling.stop_token_ids)
        self.ledger.hold(request)
        tokens = (*self._start, *request.prompt)
        rows = make_rows(request, self.vocabulary, tokens, match, settings, self._adapters.get(request.adapter))
        self._prompts.append(PromptReading(request, tokens, rows))
        self._opening = self._opening or self._begin_opening()

    def step(self) -> Sequence[TokenEvent]:
        try:
            events = self._end_cancelled()
            if self._opening is None or not wait([self._opening], PAUSE).done:
                return events
            if (error := self._opening.exception()) is not None:
                return [*events, *self._fail(error)]
            decoder = self._opening.result()
            self._restore_prefixes(decoder)
            return [*events, *self._write(decoder), *self._read(decoder)]
        except RuntimeFailure:
            raise
        except Exception as error:  # its text holds paths of the machine that built the engine
            raise RuntimeFailure("OpenVINO failed while it wrote") from error

    def cancel(self, request_id: int, choice: int | None = None) -> None:
        for row in self._list_rows():
            if row.request.id == request_id and choice in (None, row.index):
                row.is_cancelled = True

    def load_adapter(self, number: int, folder: Path) -> None:
        self._adapters[number] = read_low_rank_adapter(folder, self._open_for_adapters().products)

    def compute_logits(self, ids: Array, adapter: int = 0) -> Array:
        return self._open_for_adapters().compute_logits(ids, self._adapters.get(adapter))

    def _open_for_adapters(self) -> OpenDecoder:
        """Return the decoder, which was opened at once if it was for adapters. Raises InputError where it was not."""
        decoder = self._opening.result() if self._opening is not None else None
        if decoder is None or not decoder.products:
            raise InputError("the engine was not opened for adapters, or no layer takes one (AWQ). Serve it merged")
        return decoder

    def unload_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    def load_prefixes(self, path: Path, model: str) -> None:
        self._file = PrefixFile(path, model)
        if self._opening is not None:
            self._restore_prefixes(self._opening.result())

    def save_prefixes(self) -> None:
        if self._file is not None:
            self._file.write(self._prefixes.blocks)

    def _restore_prefixes(self, decoder: OpenDecoder) -> None:
        """Go on with the prefix cache of an earlier engine, if that has not been done."""
        if self._file is not None and not self._file.is_read:
            parts = decoder.describe_blocks(BLOCK_TOKENS)
            self._prefixes.restore(self._file.read(parts, decoder.compute, self._count_spare()))

    def can_draft(self, request: GenerationRequest) -> bool:
        """Return whether the model and its draft are open, and the cache has room for a request that is alone."""
        is_open = self._opening is not None and self._opening.done() and self._opening.exception() is None
        return is_open and request.sampling.n == 1 and self._capacity.has_room(request)

    @property
    def is_idle(self) -> bool:
        return not self._list_rows()

    def close(self) -> None:
        self._end_all(self._list_rows(), "cancelled")
        self._prompts.clear()
        self._joining, self._rows, self._past, self._sources = [], [], [], NO_SOURCE
        self._prefixes.trim(0)
        if self._opening is not None:
            wait([self._opening])
            self._opening = None
        if self._encoder is not None:
            self._encoder.close()

    def _list_rows(self) -> list[DecoderRow]:
        """List the choices under way, and those that wait."""
        prompts = (row for each in self._prompts for row in each.rows)
        rows = [*self._rows, *(each.row for each in self._joining), *prompts]
        return [row for row in rows if not row.is_done]

    def _end_cancelled(self) -> list[TokenEvent]:
        events = self._end_all([row for row in self._list_rows() if row.is_cancelled], "cancelled")
        self._prompts = [prompt for prompt in self._prompts if prompt.drop_done()]
        return events

    def _fail(self, error: BaseException) -> list[TokenEvent]:
        """End what waits for the model, which was not opened; it is tried again for the next request."""
        self._opening = None
        text = "the engine that these settings of sampling need cannot be opened: " + describe_error(error)
        events = self._end_all(self._list_rows(), "failed", text)
        self._prompts.clear()
        return events

    def _end_all(self, rows: Sequence[DecoderRow], reason: FinishReason, error: str = "") -> list[TokenEvent]:
        for row in rows:
            self._end(row)
        return [TokenEvent(row.request.id, row.index, (), finish_reason=reason, error=error) for row in rows]

    def _end(self, row: DecoderRow) -> None:
        row.is_done = True
        self.ledger.release(row.request.id, row.index)

    def _write(self, decoder: OpenDecoder) -> Sequence[TokenEvent]:
        """Write the next token of every row, and of one that is alone the tokens of its draft that are right."""
        self._arrange(decoder)
        if not self._rows:
            return []
        draft = self._draft(decoder)
        ids = np.array([[row.token, *draft] for row in self._rows], np.int64)
        lengths = np.array([row.length for row in self._rows], np.int64)
        adapters = [row.adapter for row in self._rows]
        logits, self._past = decoder.rows.run(ids, lengths, self._past, self._sources, 1 + len(draft), adapters)
        events = [self._choose(row, scores, draft) for row, scores in zip(self._rows, logits, strict=True)]
        if wrong := len(draft) - events[0].accepted:
            self._past = decoder.rows.cut(self._past, wrong)
        return events

    def _draft(self, decoder: OpenDecoder) -> list[int]:
        """Draft the next tokens of a row that is alone: several rows read the weights together anyway."""
        return self._rows[0].draft(decoder.draft) if len(self._rows) == 1 and self._encoder is None else []

    def _choose(self, row: DecoderRow, logits: Array, draft: Sequence[int] = ()) -> TokenEvent:
        """Choose the next tokens of a row, which may end with them. logits: [1 + draft, vocabulary]."""
        event = row.choose(logits, draft)
        row.length += 1 + event.accepted
        if event.finish_reason is not None:
            self._end(row)
        return event

    def _read(self, decoder: OpenDecoder) -> Sequence[TokenEvent]:
        """Read pieces of prompts; choose the first tokens of those that are read to their end, which then join."""
        events: list[TokenEvent] = []
        rest, most = self.limit_reading(writes=bool(self._rows))
        self._steps += 1
        for prompt in order_prompts(self._prompts, self._steps):
            has_room = prompt.read or self._measure_batch(prompt) <= self._capacity.total * BLOCK_TOKENS
            if rest <= 0 or not has_room:
                break
            if not prompt.read and not self._begin_reading(prompt):
                continue
            piece = prompt.tokens[prompt.read : prompt.read + min(rest, most)]
            rest -= max(len(piece), LEAST_COST)
            ids, read = np.array([piece], np.int64), np.array([prompt.read], np.int64)
            for other in self._prompts:
                if other is not prompt:
                    other.keep_past()
            past = prompt.past or decoder.prompts.make_past(1, 0)
            kept = len(piece) if prompt.request.sampling.prompt_logprobs else 1
            logits, prompt.past = decoder.prompts.run(ids, read, past, prompt.source, kept, [prompt.rows[0].adapter])
            prompt.read, prompt.is_past_lent = prompt.read + len(piece), True
            if prompt.request.sampling.prompt_logprobs:
                prompt.score(logits[0])
            if prompt.read == len(prompt.tokens):
                self._prompts.remove(prompt)
                events += self._join(prompt, logits[0, -1])
        return events

    def _begin_reading(self, prompt: PromptReading) -> bool:
        """Have the source of a prompt encoded, or take its beginning from the prefix cache. Return whether it can be
        read now."""
        if self._encoder is not None:
            has_others = self._rows or self._joining or prompt is not self._prompts[0]
            return prompt.encode(self._encoder, 0 if has_others else PAUSE)
        if not prompt.request.sampling.prompt_logprobs:
            prompt.read, prompt.past = self._prefixes.find(prompt.tokens, prompt.rows[0].adapter_digest)
        prompt.cached = prompt.read
        self._prefixes.trim(self._count_spare(prompt))
        return True

    def _join(self, prompt: PromptReading, logits: Array) -> Sequence[TokenEvent]:
        """Have the rows of a prompt join the batch, each with its first token. logits: behind it, [vocabulary]."""
        events = [self._choose(row, logits[None]) for row in prompt.rows]
        if not prompt.source:
            self._prefixes.keep(prompt.tokens, prompt.past, 0, self._count_spare(prompt), prompt.rows[0].adapter_digest)
            events[0] = replace(events[0], cached_tokens=prompt.cached)
        prompt.keep_past()
        for row in prompt.rows:
            row.length, row.source = prompt.read, prompt.source
            if not row.is_done:
                self._joining.append(JoiningRow(row, prompt.past, 0))
        return [replace(event, prompt_scores=tuple(prompt.scores)) for event in events]

    def _count_spare(self, prompt: PromptReading | None = None) -> int:
        """Count the blocks that prefixes may have: the memory that the rows, and those of a prompt, leave free."""
        return COPIES * (self._capacity.total - -(-self._measure_batch(prompt) // BLOCK_TOKENS))

    def _measure_batch(self, prompt: PromptReading | None) -> int:
        """Return the tokens of the rows, and those of a prompt, all padded to the longest that any may become."""
        read = [row for each in self._prompts if each.read or each is prompt for row in each.rows]
        rows = [*self._rows, *(joining.row for joining in self._joining), *read]
        lengths = [row.request.length for row in rows if not row.is_done]
        return len(lengths) * max(lengths, default=0)

    def _arrange(self, decoder: OpenDecoder) -> None:
        """Take the rows out of the batch that are done, and in those that join; padded to the longest of them."""
        if not self._joining and not any(row.is_done for row in self._rows):
            return
        staying = [JoiningRow(row, self._past, place) for place, row in enumerate(self._rows)]
        for each in staying:
            if each.row.is_done and not each.row.source:
                text = each.row.chooser.tokens[: each.row.length]
                self._prefixes.keep(text, each.past, each.place, self._count_spare(), each.row.adapter_digest)
        batch = [each for each in (*staying, *self._joining) if not each.row.is_done]
        self._past = decoder.rows.arrange([(each.past, each.place, each.row.length) for each in batch])
        self._rows, self._joining = [each.row for each in batch], []
        if self._encoder is not None and batch:
            self._sources = self._encoder.join([row.source for row in self._rows])
