"""OpenVINO GenAI on the CPU: continuous batching over paged attention, with a cache of prefixes."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from laconic.arrays import Array
from laconic.errors import InputError, RuntimeFailure
from laconic.runtimes.decoder_file import find_value_group
from laconic.runtimes.generator import (
    BlockLedger,
    FinishReason,
    GenerationRequest,
    Generator,
    Sampling,
    TokenEvent,
    check_prompt,
    order_prompts,
)
from laconic.runtimes.open_blocks import OpenBlocks, count_common
from laconic.runtimes.openvino import HINTS, find_compute, make_properties, ov  # first: keeps telemetry out
from laconic.runtimes.prefix_cache import PrefixCache
from laconic.runtimes.runtime import Compute
from laconic.runtimes.stateful_graph import CacheShape, PagingRefused, StatefulModel, make_stateful

import openvino_genai  # isort: skip

STEP_TOKENS = 256
"""Tokens that a step reads and writes, so many choices at most among them."""
BLOCK_TOKENS = 32
"""Tokens of a block of the cache, on the CPU (2026.4)."""
CLOSING = 2
"""Tokens that are written behind a text to close it. The first is computed with the prompt; with the second the engine
names the last block after the longer text, so that it is not found by the text's own."""
KEPT = {"float32": 4, "bfloat16": 2, "int8-dynamic": 4}
"""Bytes of a number in a cache in float, by the arithmetic. BF16 with a cache in FP32 is refused by the engine, and
FP32 with one in BF16 too (2026.4)."""
INT8_CACHE = {
    "KEY_CACHE_PRECISION": "u8",
    "VALUE_CACHE_PRECISION": "u8",
    "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
    "VALUE_CACHE_QUANT_MODE": "BY_TOKEN",
    "KEY_CACHE_GROUP_SIZE": "0",
    "VALUE_CACHE_GROUP_SIZE": "0",
}
"""The engine's settings for a cache as graphs with one in 8 bits round it. By default keys have a scale for each
channel of a block, and are rounded anew as it fills. Values in 4 bits are kept two in a byte, with a scale for each
group of `VALUE_CACHE_GROUP_SIZE`, 0 for a whole head (2026.4)."""
NO_STOP = 1 << 40
"""A token that no model has, for requests that end by their length alone: the engine asks for an end token."""
COLDEST = 1e-3
"""The least temperature that tokens are drawn with: below it the likeliest has all of the probability anyway, and the
engine's division by it overflows."""
NARROWEST = 1e-6
"""The least top_p: smaller ones may be 0 in single precision, which the engine refuses. Either leaves one token."""


@dataclass
class EngineChoice:
    """A choice under way, which to the engine is a request of its own: of several sequences of one request, the engine
    gives nothing until all have ended. handle: of the text, or of a piece of its prompt; None while the engine has
    neither. read: tokens of the prompt that the engine was given. tokens: written so far. closing: tokens behind a text
    that ended, while it is being closed."""

    request: GenerationRequest
    index: int
    handle: "openvino_genai.GenerationHandle | None" = None
    read: int = 0
    tokens: list[int] = field(default_factory=list)
    closing: list[int] = field(default_factory=list)
    is_cancelled: bool = False

    @cached_property
    def prompt(self) -> Array:
        """The tokens of the prompt, [tokens]."""
        return np.array(self.request.prompt, np.int64)

    @property
    def text(self) -> Array:
        """What the engine has of the prompt and has written, [tokens]."""
        return np.append(self.prompt[: self.read], np.array(self.closing or self.tokens, np.int64))

    @property
    def left(self) -> int:
        """Tokens of the prompt that the engine was not given yet."""
        return len(self.request.prompt) - self.read


class OpenVinoGenAi(Generator):
    """A decoder in OpenVINO GenAI's continuous batching.

    Choices after the first of a request begin when that has read the prompt, whose blocks they then share. Prompts are
    read in pieces, so that running texts get their next tokens meanwhile: each piece is a request of its own, for one
    token that nobody reads, and the next one finds its blocks in the cache of prefixes.
    """

    gives_scores = False

    def __init__(
        self,
        model: Path,
        *,
        context: int,
        cache_bytes: int,
        threads: int = 1,
        compute: Compute = "float32",
        has_prefix_cache: bool = True,
    ) -> None:
        """model: a decoder with a cache, in ONNX. context: the most tokens that it takes. cache_bytes: of the cache of
        all requests. Raises RuntimeFailure where the graph or the engine refuses."""
        compute = find_compute(compute)
        stateful = make_stateful(model, context)
        blocks = cache_bytes // (BLOCK_TOKENS * stateful.cache.count_bytes(KEPT[compute]))
        if not blocks:
            raise RuntimeFailure(f"the cache of {cache_bytes} bytes holds no block of {BLOCK_TOKENS} tokens of {model}")
        self.ledger = BlockLedger(blocks, BLOCK_TOKENS)
        self.vocabulary = stateful.vocabulary
        self.cache: CacheShape = stateful.cache
        self._choices: dict[tuple[int, int], EngineChoice] = {}
        self._next = self._steps = 0
        self._prefixes = PrefixCache(BLOCK_TOKENS) if has_prefix_cache else None
        self._open_blocks = OpenBlocks(BLOCK_TOKENS, 2 * blocks)
        properties = make_properties(threads, compute) | make_cache_properties(stateful.cache, compute)
        self._pipeline = open_pipeline(stateful, model, blocks, properties, has_prefix_cache)

    def add(self, request: GenerationRequest) -> None:
        check_prompt(request, self.vocabulary)
        if request.sampling.needs_logits:
            raise InputError("the engine does not give the scores of all tokens, which these settings of sampling need")
        try:
            make_config(request.sampling, 0).validate()
        except Exception:
            raise InputError("the engine does not take these settings of sampling: one is out of its range") from None
        self.ledger.hold(request)
        for index in range(request.sampling.n):
            self._choices[request.id, index] = EngineChoice(request, index)

    def step(self) -> Sequence[TokenEvent]:
        try:
            self._begin()
            self._pipeline.step()
            return [event for choice in list(self._choices.values()) for event in self._read(choice)]
        except Exception as error:  # its text holds paths of the machine that built the engine
            raise RuntimeFailure("OpenVINO GenAI failed while it wrote") from error

    def cancel(self, request_id: int, choice: int | None = None) -> None:
        for key, each in self._choices.items():
            if key[0] == request_id and choice in (None, key[1]):
                each.is_cancelled = True
                if each.handle is not None:
                    each.handle.cancel()

    @property
    def is_idle(self) -> bool:
        return not self._choices

    def close(self) -> None:
        for request_id, _ in list(self._choices):
            self.cancel(request_id)
        with suppress(Exception):  # an engine that has failed fails again
            self._pipeline.step()
        del self._pipeline

    def _may_begin(self, choice: EngineChoice) -> bool:
        """Return whether the blocks of the prompt can be shared, or there is nothing to share."""
        first = self._choices.get((choice.request.id, 0))
        return choice.index == 0 or first is None or bool(first.tokens) or first.is_cancelled

    def _begin(self) -> None:
        """Give the engine as many tokens of prompts that it must compute as a step may read."""
        rest, most = self.limit_reading(writes=any(choice.tokens for choice in self._choices.values()))
        waiting = (each for each in self._choices.values() if each.handle is None and not each.is_cancelled)
        self._steps += 1
        for choice in order_prompts(waiting, self._steps):
            if rest > 0 and self._may_begin(choice) and not self._would_share(choice):
                rest -= self._give(choice, min(rest, most))

    def _would_share(self, choice: EngineChoice) -> bool:
        """Return whether the engine would have the prompt of a choice and a text under way write into one block."""
        under_way = (each.text for each in self._choices.values() if each.handle is not None)
        return self._prefixes is not None and self._open_blocks.would_share(choice.prompt, under_way)

    def _give(self, choice: EngineChoice, most: int) -> int:
        """Give the engine the prompt of a choice, or its next whole blocks. Return the tokens that it must compute, at
        most `most` of them."""
        sampling, prompt = choice.request.sampling, choice.request.prompt
        cached = len(prompt) if self._prefixes is None else max(choice.read, self._prefixes.find(prompt)[0])
        stop = min(len(prompt), cached + most)
        if stop < len(prompt):
            stop -= stop % BLOCK_TOKENS
        if stop <= cached < len(prompt):
            return most
        end = self._find_shared_end(choice, cached)
        choice.read = stop = end or stop
        piece = Sampling(CLOSING if end else 1)
        config = make_config(piece, 0) if choice.left else make_config(sampling, choice.index)
        choice.handle = self._pipeline.add_request(self._next, ov.Tensor(choice.prompt[None, :stop]), config)
        self._next += 1
        return stop - cached

    def _find_shared_end(self, choice: EngineChoice, start: int) -> int:
        """Return the length of a text that ended in the block at `start` of a prompt, and that another waiting prompt
        continues as well; 0 where there is none. Such a text is closed first, by `CLOSING` tokens; otherwise each of
        these prompts would have to wait until the one before it is answered."""
        length = 0 if self._prefixes is None else self._open_blocks.find(choice.prompt, start)
        waiting = (each for each in self._choices.values() if each.handle is None and each is not choice)
        shares = (count_common(each.prompt[: length + 1], choice.prompt[:length]) == length for each in waiting)
        return length if length and any(shares) else 0

    def _end_piece(self, choice: EngineChoice, tokens: Sequence[int]) -> None:
        """Note that the engine has a piece of a prompt, where it has written what it was asked for."""
        is_closing = choice.read % BLOCK_TOKENS > 0
        choice.closing += tokens if is_closing else ()
        if is_closing and len(choice.closing) < CLOSING:
            return
        self._keep(choice.text)
        if is_closing:
            self._open_blocks.close(choice.prompt[: choice.read])
            choice.read -= choice.read % BLOCK_TOKENS
        choice.closing = []
        choice.handle = None

    def _keep(self, text: Array) -> None:
        """Note that the engine has the blocks of a text that has ended."""
        if self._prefixes is not None:
            self._prefixes.keep(text.tolist(), (), 0, self.ledger.total)
            self._open_blocks.end(text)

    def _read(self, choice: EngineChoice) -> Sequence[TokenEvent]:
        """Read what a step added to a choice, and forget the choice where it ended."""
        request = choice.request
        tokens: list[int] = []
        logprobs: list[float] = []
        reason: FinishReason | None = None
        if choice.is_cancelled:
            reason = "cancelled"
        elif choice.handle is not None:
            while choice.handle.can_read():  # each reading gives one token
                for output in choice.handle.read().values():
                    tokens += output.generated_ids
                    logprobs += output.generated_log_probs
            if tokens and choice.left:
                self._end_piece(choice, tokens)
                return []
            choice.tokens += tokens
            if tokens and tokens[-1] in request.sampling.stop_token_ids:
                reason = "stop"
            elif len(choice.tokens) >= request.sampling.max_new_tokens:
                reason = "length"
            elif choice.handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                raise RuntimeError("the engine gave a request up")
        if reason is not None:
            self._keep(choice.text)
            del self._choices[request.id, choice.index]
            self.ledger.release(request.id, choice.index)
        elif not tokens:
            return []
        given = tuple(logprobs) if request.sampling.logprobs else ()
        return [TokenEvent(request.id, choice.index, tuple(tokens), given, reason)]


def make_cache_properties(cache: CacheShape, compute: Compute) -> dict[str, str]:
    """Make the engine's settings for a cache as a graph keeps it."""
    if not cache.bits:
        return {"KV_CACHE_PRECISION": HINTS[compute]}
    if 4 not in cache.bits:
        return INT8_CACHE
    (width,) = {width for _, width in cache.layers}
    group = find_value_group(width)
    return INT8_CACHE | {
        "VALUE_CACHE_PRECISION": "u4",
        "VALUE_CACHE_GROUP_SIZE": str(0 if group == width else group),
    }


def open_pipeline(
    stateful: StatefulModel, model: Path, blocks: int, properties: Mapping[str, object], has_prefix_cache: bool
) -> "openvino_genai.ContinuousBatchingPipeline":
    """Open the engine on a model, which it takes from a folder alone. Raises RuntimeFailure where it refuses."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = blocks
    scheduler.enable_prefix_caching = has_prefix_cache
    scheduler.max_num_batched_tokens = STEP_TOKENS
    try:
        with tempfile.TemporaryDirectory(prefix="laconic-") as name:
            folder = Path(name)
            ov.save_model(stateful.graph, folder / "openvino_model.xml", compress_to_fp16=False)
            (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
            return openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", dict(properties))
    except OSError as error:
        raise RuntimeFailure(f"the model cannot be written to the folder of temporary files: {error}") from error
    except Exception as error:  # its text holds paths of the machine that built the engine
        raise PagingRefused(
            f"OpenVINO GenAI refuses {model.name}: it cannot page the attention of this graph"
        ) from error


def make_config(sampling: Sampling, index: int) -> "openvino_genai.GenerationConfig":
    """Make the engine's settings of one choice. index: of the choice.

    The engine's frequency and presence penalties are not used: where a logit is negative they make its token more
    likely instead of less (2026.4).
    """
    config = openvino_genai.GenerationConfig()
    config.apply_chat_template = False
    config.max_new_tokens = sampling.max_new_tokens
    config.ignore_eos = not sampling.stop_token_ids
    config.eos_token_id = sampling.stop_token_ids[0] if sampling.stop_token_ids else NO_STOP
    config.stop_token_ids = set(sampling.stop_token_ids) or {NO_STOP}
    config.repetition_penalty = sampling.repetition_penalty
    config.logprobs = int(sampling.logprobs)
    config.do_sample = sampling.temperature >= COLDEST
    if config.do_sample:
        config.temperature = sampling.temperature
        config.top_p = max(sampling.top_p, NARROWEST)
        config.min_p = sampling.min_p
        config.rng_seed = sampling.seed + index
        if sampling.top_k:
            config.top_k = sampling.top_k
    return config
