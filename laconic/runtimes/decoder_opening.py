"""Opening a decoder with a cache on the CPU by OpenVINO, and proving that its rows can be batched."""

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from laconic.arrays import Array
from laconic.errors import RuntimeFailure
from laconic.runtimes.adapter_graph import LinearProduct, add_adapters
from laconic.runtimes.batched_graph import read_batched
from laconic.runtimes.decoder_file import encoder_of
from laconic.runtimes.decoder_requests import NO_SOURCE, CachePart, DecoderRequests
from laconic.runtimes.draft_file import DraftFile
from laconic.runtimes.draft_model import DraftModel
from laconic.runtimes.encoder_decoder_graph import read_encoder_decoder
from laconic.runtimes.low_rank_adapter import LowRankAdapter
from laconic.runtimes.openvino import OpenVino, core, find_compute, make_properties, ov
from laconic.runtimes.prefix_file import BlockPart
from laconic.runtimes.runtime import Compute
from laconic.runtimes.source_encoder import SourceEncoder
from laconic.runtimes.stateful_graph import FEATURES, read_vocabulary

PROBED, SHIFTED = 24, 9
"""Tokens of the text and of the padding with which a graph is tried."""
AGREEMENT = 0.05
"""Logits differ by less than this share of the largest, with padding in front or without; BF16 rounds to 0.004."""


@dataclass(frozen=True)
class OpenDecoder:
    """A decoder that is ready. prompts, rows: what prompts are read with, one at a time, and what the batch is.
    encoder: of an encoder-decoder, or the tower of a vision-language model. products: those that adapters are computed
    beside. compute: the arithmetic that it runs in. draft: a smaller model that drafts its tokens."""

    prompts: DecoderRequests
    rows: DecoderRequests
    vocabulary: int
    encoder: SourceEncoder | None = None
    products: Sequence[LinearProduct] = ()
    compute: Compute = "float32"
    draft: DraftModel | None = None

    @property
    def token_bytes(self) -> int:
        """The bytes that a token takes in the cache, or one of a source, in FP32, where that takes more."""
        kept = sum(part.heads * part.size * part.type.itemsize for part in self.rows.cache)
        return max(kept, 0 if self.encoder is None else 4 * self.encoder.numbers)

    def describe_blocks(self, tokens: int) -> list[BlockPart]:
        """Describe blocks of so many tokens of its cache, for the file of a prefix cache."""
        return [BlockPart(part.name, (part.heads, tokens, part.size), str(part.type)) for part in self.rows.cache]

    def compute_logits(self, ids: Array, adapter: LowRankAdapter | None) -> Array:
        """Compute the logits behind every token of texts, [rows, tokens, vocabulary]. ids: [rows, tokens]."""
        rows, tokens = ids.shape
        past, lengths = self.prompts.make_past(rows, 0), np.zeros(rows, np.int64)
        return self.prompts.run(ids, lengths, past, kept=tokens, adapters=[adapter] * rows)[0]


def begin_opening(
    model: Path,
    context: int,
    threads: int,
    compute: Compute,
    longest: int | None,
    has_adapters: bool,
    draft: DraftFile | None = None,
) -> "Future[OpenDecoder]":
    """Open a decoder in a thread of its own, so that others write meanwhile. longest: of an encoder-decoder, as
    `open_encoder_decoder` takes it; None for any other. draft: of a model that drafts its tokens. The rest as
    `open_decoder` takes it."""
    future: Future[OpenDecoder] = Future()

    def work() -> None:
        try:
            if longest is None:
                decoder = open_decoder(model, context, threads, compute, has_adapters=has_adapters)
                future.set_result(decoder if draft is None else add_draft(decoder, draft, context, threads))
            else:
                future.set_result(open_encoder_decoder(model, context, threads, compute, longest))
        except BaseException as error:  # passed on to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=work, name="open decoder", daemon=True).start()
    return future


def open_decoder(
    model: Path, context: int, threads: int, compute: Compute, *, has_adapters: bool = False
) -> OpenDecoder:
    """Open a decoder in ONNX, and the tower of images beside it if it reads any. context: the most tokens that it
    takes. has_adapters: whether adapters can be computed beside it. Raises RuntimeFailure where the graph or the engine
    refuses."""
    graph, pasts = read_batched(model)
    products = add_adapters(graph) if has_adapters else []
    names = {name for each in graph.inputs for name in each.get_names()}
    tower = open_encoder(model, names, threads, compute) if FEATURES in names else None
    return compile_decoder(model, graph, pasts, context, threads, compute, tower, products)


def add_draft(decoder: OpenDecoder, draft: DraftFile, context: int, threads: int) -> OpenDecoder:
    """Open a draft model beside a decoder. Raises RuntimeFailure where it or the engine refuses."""
    drafting = open_decoder(draft.model, context, threads, draft.compute)
    if drafting.vocabulary != decoder.vocabulary:
        raise RuntimeFailure(
            f"{draft.model.name} has {drafting.vocabulary} tokens and the model {decoder.vocabulary}, for which it "
            f"cannot draft. Build the artifact again"
        )
    return replace(decoder, draft=DraftModel(drafting.rows, context))


def open_encoder_decoder(model: Path, context: int, threads: int, compute: Compute, longest: int) -> OpenDecoder:
    """Open the decoder of an encoder-decoder in ONNX, and the encoder beside it. context: the most tokens of an answer.
    longest: the most tokens of a source. Raises RuntimeFailure where a graph or the engine refuses."""
    graph, pasts = read_encoder_decoder(model)
    names = {name for each in graph.inputs for name in each.get_names()}
    encoder = open_encoder(model, names, threads, compute, longest)
    return compile_decoder(model, graph, pasts, context, threads, compute, encoder)


def open_encoder(
    model: Path, names: Collection[str], threads: int, compute: Compute, longest: int = 0
) -> SourceEncoder:
    """Open the encoder, or the tower of images, beside a decoder. names: of the decoder's inputs. longest: the most
    tokens of a source. Raises RuntimeFailure."""
    session = OpenVino().open(encoder_of(model), threads=threads, compute=compute)
    return SourceEncoder(session, model, names, longest)


def compile_decoder(
    model: Path,
    graph: "ov.Model",
    pasts: "Sequence[ov.op.Parameter]",
    context: int,
    threads: int,
    compute: Compute,
    encoder: SourceEncoder | None = None,
    products: Sequence[LinearProduct] = (),
) -> OpenDecoder:
    """Compile a decoder, and prove that rows of different lengths can be batched. Raises RuntimeFailure."""
    cache, vocabulary = [CachePart.read(past) for past in pasts], read_vocabulary(graph, model)
    properties = make_properties(threads, find_compute(compute)) | {"NUM_STREAMS": "1"}
    try:
        compiled = core().compile_model(graph, "CPU", properties)
        prompts, rows = (DecoderRequests(compiled, cache, products) for _ in range(2))
        shift = measure_shift(rows, min(PROBED, context - 1), vocabulary, encoder)
    except Exception as error:  # the engine raises RuntimeError and its like
        raise RuntimeFailure(f"OpenVINO refuses {model.name}") from error
    if not shift <= AGREEMENT:
        raise RuntimeFailure(f"{model.name} cannot be batched: padding in front of a text changes what follows it")
    return OpenDecoder(prompts, rows, vocabulary, encoder, products, find_compute(compute))


def measure_shift(
    requests: DecoderRequests, tokens: int, vocabulary: int, encoder: SourceEncoder | None = None
) -> float:
    """Measure how much padding in front of a text, and behind its source, changes what follows it, as it does with a
    mask that counts from the beginning: the largest difference of logits, as a share of the largest."""
    if tokens < 1:
        return 0.0
    ids, none = np.arange(tokens)[None] % vocabulary, np.zeros(1, np.int64)
    alone = together = NO_SOURCE
    rows = 1
    if encoder is not None:
        alone, together, rows = (
            encoder.join(encoder.probes[:1]),
            encoder.join([encoder.probes[0], encoder.probes[-1]]),
            2,
        )
    past = [array.copy() for array in requests.run(ids, none, requests.make_past(1, 0), alone)[1]]
    padded = [np.pad(array.repeat(rows, 0), ((0, 0), (0, 0), (SHIFTED, 0), (0, 0))) for array in past]
    plain = requests.run(ids[:, :1], none + tokens, past, alone)[0].copy()
    shifted = requests.run(ids[:, :1].repeat(rows, 0), (none + tokens).repeat(rows), padded, together)[0][:1].copy()
    return float(np.abs(plain - shifted).max() / np.abs(plain).max())
