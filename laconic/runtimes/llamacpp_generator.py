"""llama.cpp on the CPU, as an engine that writes: each step reads a token of every text under way and pieces of prompts
in one batch, and tokens are chosen here."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laconic.arrays import Array
from laconic.errors import InputError, RuntimeFailure
from laconic.runtimes.decoder_file import gguf_of
from laconic.runtimes.decoder_rows import DecoderRow, PromptReading
from laconic.runtimes.generator import (
    BlockLedger,
    GenerationRequest,
    Generator,
    GoldenToken,
    TokenEvent,
    check_length,
    check_prompt,
    order_prompts,
)
from laconic.runtimes.grammar import GrammarTokens, begin_match
from laconic.runtimes.llamacpp_library import TEXTS, LlamaModel, Reading
from laconic.runtimes.llamacpp_texts import TextPool
from laconic.runtimes.runtime import Compute
from laconic.runtimes.token_chooser import TokenChooser, check_sampling
from laconic.runtimes.token_proof import count_differing, may_differ

BLOCK_TOKENS = 32
"""Tokens of a block of the ledger; the cache has none."""
MOST_PREFIX_TOKENS = 4096
"""Tokens of ended texts that stay in the cache: every step looks at all of its places up to the last one in use."""


class LlamaCppGenerator(Generator):
    """A decoder in llama.cpp. A request begins, first come first served, when there is a text for each of its choices;
    texts that have ended stay as prefixes of others, the least recently used of them shortest.

    By pieces of 32, next tokens come after 1.0 s beside a long prompt and not after 1.2 s, but its own first one after
    131 s and not after 74 (`benchmarks/long_prompts.py`).
    """

    piece = 64

    def __init__(
        self,
        model: Path,
        *,
        context: int,
        cache_bytes: int,
        threads: int = 1,
        compute: Compute = "int8-dynamic",
        tokenizer: Path | None = None,
        generation: Mapping[str, Any] | None = None,
        longest: int = 0,
        golden: Sequence[GoldenToken] = (),
        has_adapters: bool = False,
    ) -> None:
        """model: a decoder's file, beside which lies that of llama.cpp. context: the most tokens that it takes.
        cache_bytes: of the cache of all requests. compute: the only arithmetic that there is. tokenizer: its file, for
        grammars. generation, longest: of an encoder-decoder, which is refused. golden: what the model must write.
        has_adapters: whether adapters are wanted, which are not loaded here. Raises RuntimeFailure."""
        if generation is not None or longest or compute != "int8-dynamic":
            raise RuntimeFailure(
                f"llama.cpp writes language models in int8-dynamic here, not {model.name} in {compute}"
            )
        self.context = context
        if has_adapters:
            self.note = "no adapters can be loaded beside a model in llama.cpp"
        self._model = LlamaModel(gguf_of(model), threads=threads)
        self.vocabulary = self._model.vocabulary
        blocks = cache_bytes // (BLOCK_TOKENS * self._model.token_bytes)
        if not blocks:
            raise RuntimeFailure(f"the cache of {cache_bytes} bytes holds no block of {BLOCK_TOKENS} tokens of {model}")
        self._model.open_cache(blocks * BLOCK_TOKENS)
        self.ledger = BlockLedger(blocks, BLOCK_TOKENS)
        self._grammars = None if tokenizer is None else GrammarTokens(tokenizer, self.vocabulary)
        self._waiting: deque[PromptReading] = deque()
        self._prompts: list[PromptReading] = []
        self._steps = 0
        self._rows: list[DecoderRow] = []
        self._texts = TextPool(self._model)
        if (wrong := count_differing(self, golden)) > may_differ(golden):
            raise RuntimeFailure(
                f"llama.cpp computes {gguf_of(model).name} wrongly on this machine: {wrong} of {len(golden)} golden "
                f"tokens differ"
            )

    def add(self, request: GenerationRequest) -> None:
        check_prompt(request, self.vocabulary)
        sampling = request.sampling
        check_sampling(sampling, self.vocabulary)
        if request.source is not None or sampling.timestamps or request.adapter:
            raise InputError("llama.cpp writes language models alone: leave out the source, timestamps and the adapter")
        check_length(request, self.context)
        if sampling.n > TEXTS:
            raise InputError(f"{sampling.n} choices are more than llama.cpp writes at once here, which are {TEXTS}")
        match = begin_match(self._grammars, sampling.grammar, sampling.stop_token_ids)
        self.ledger.hold(request)
        choosers = [
            TokenChooser(request, index, self.vocabulary, request.prompt, match and match.copy())
            for index in range(sampling.n)
        ]
        rows = [DecoderRow(request, index, chooser) for index, chooser in enumerate(choosers)]
        self._waiting.append(PromptReading(request, request.prompt, rows))

    def step(self) -> Sequence[TokenEvent]:
        events = self._end_cancelled()
        self._begin()
        is_alone = len(self._rows) == 1 and not self._prompts
        drafts = [row.draft() if is_alone else [] for row in self._rows]
        readings = [
            Reading(row.text, (row.token, *draft), row.length, 1 + len(draft))
            for row, draft in zip(self._rows, drafts, strict=True)
        ]
        pieces = self._cut_prompts(TEXTS - sum(each.kept for each in readings))
        if not readings and not pieces:
            return events
        logits = self._model.read([*readings, *(piece for _, piece in pieces)])
        for row, draft, scores in zip(list(self._rows), drafts, logits, strict=False):
            events.append(self._write(row, draft, scores))
        for (prompt, piece), scores in zip(pieces, logits[len(readings) :], strict=True):
            events += self._read(prompt, piece, scores)
        return events

    def cancel(self, request_id: int, choice: int | None = None) -> None:
        for row in self._list_rows():
            if row.request.id == request_id and choice in (None, row.index):
                row.is_cancelled = True

    @property
    def is_idle(self) -> bool:
        return not self._list_rows()

    def close(self) -> None:
        for row in self._list_rows():
            self.ledger.release(row.request.id, row.index)
        self._waiting.clear()
        self._prompts, self._rows = [], []
        self._model.close()

    def _list_rows(self) -> list[DecoderRow]:
        """List the choices under way, and those that wait."""
        return [*self._rows, *(row for prompt in (*self._prompts, *self._waiting) for row in prompt.rows)]

    def _end_cancelled(self) -> list[TokenEvent]:
        cancelled = [row for row in self._list_rows() if row.is_cancelled]
        for row in cancelled:
            self.ledger.release(row.request.id, row.index)
        for row in self._rows:
            if row.is_cancelled:
                self._texts.end(row.text, row.chooser.tokens[: row.length])
        self._rows = [row for row in self._rows if not row.is_cancelled]
        for prompt in (*self._prompts, *self._waiting):
            prompt.rows = [row for row in prompt.rows if not row.is_cancelled]
            for text in prompt.texts[len(prompt.rows) :]:
                self._texts.release(text)
            prompt.texts = prompt.texts[: len(prompt.rows)]
        self._prompts = [prompt for prompt in self._prompts if prompt.rows]
        self._waiting = deque(prompt for prompt in self._waiting if prompt.rows)
        return [TokenEvent(row.request.id, row.index, (), finish_reason="cancelled") for row in cancelled]

    def _begin(self) -> None:
        """Begin the requests for whose choices there are texts, each behind the longest prefix that is in the cache."""
        self._texts.trim(min(MOST_PREFIX_TOKENS, BLOCK_TOKENS * (self.ledger.total - self.ledger.used)))
        while self._waiting and self._texts.available >= len(self._waiting[0].rows):
            prompt = self._waiting.popleft()
            is_scored = prompt.request.sampling.prompt_logprobs
            running = {row.text: row.chooser.tokens[: row.length] for row in self._rows}
            known = () if is_scored else prompt.tokens
            prompt.texts, prompt.cached = self._texts.begin(known, len(prompt.rows), running)
            prompt.read = prompt.cached
            self._prompts.append(prompt)

    def _cut_prompts(self, most_logits: int) -> list[tuple[PromptReading, Reading]]:
        """Cut the pieces of prompts that are read next. most_logits: that they may ask for together."""
        pieces: list[tuple[PromptReading, Reading]] = []
        rest, longest = self.limit_reading(writes=bool(self._rows))
        self._steps += 1
        for prompt in order_prompts(self._prompts, self._steps):
            is_scored = prompt.request.sampling.prompt_logprobs
            most = min(rest, longest, most_logits if is_scored else rest)
            if most < 1 or most_logits < 1:
                break
            tokens = prompt.tokens[prompt.read : prompt.read + most]
            is_last = prompt.read + len(tokens) == len(prompt.tokens)
            kept = len(tokens) if is_scored else int(is_last)
            pieces.append((prompt, Reading(prompt.texts[0], tokens, prompt.read, kept)))
            rest -= len(tokens)
            most_logits -= kept
        return pieces

    def _write(self, row: DecoderRow, draft: Sequence[int], logits: Array) -> TokenEvent:
        """Choose the next tokens of a row, which ends with its last. logits: [1 + draft, vocabulary]."""
        event = row.choose(logits, draft)
        row.length += 1 + event.accepted
        if event.accepted < len(draft):
            self._model.forget(row.text, row.length)
        if event.finish_reason is not None:
            self._rows.remove(row)
            self._end(row)
        return event

    def _read(self, prompt: PromptReading, piece: Reading, logits: Array) -> Sequence[TokenEvent]:
        """Note that a piece of a prompt was read. Behind the last one choose the first token of each choice. logits:
        [kept, vocabulary]."""
        prompt.read += len(piece.tokens)
        if prompt.request.sampling.prompt_logprobs:
            prompt.score(logits)
        if prompt.read < len(prompt.tokens):
            return []
        self._prompts.remove(prompt)
        for row, text in zip(prompt.rows, prompt.texts, strict=True):
            row.text, row.length = text, prompt.read
            if text != prompt.texts[0]:
                self._model.copy(prompt.texts[0], text, prompt.read)
        events = []
        for row in prompt.rows:
            events.append(replace(row.choose(logits[-1:]), prompt_scores=tuple(prompt.scores)))
            if events[-1].finish_reason is None:
                self._rows.append(row)
            else:
                self._end(row)
        return [replace(events[0], cached_tokens=prompt.cached), *events[1:]]

    def _end(self, row: DecoderRow) -> None:
        """End a choice, whose text stays in the cache as a prefix."""
        self.ledger.release(row.request.id, row.index)
        self._texts.end(row.text, row.chooser.tokens[: row.length])
