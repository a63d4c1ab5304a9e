"""A compiled decoder with a cache that goes from call to call, opened on the CPU by OpenVINO."""

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import RuntimeFailure
from laconic.runtimes.adapter_graph import MASK, LinearProduct, add_adapters
from laconic.runtimes.batched_graph import HIDING, KEPT, PADDING, read_batched
from laconic.runtimes.decoder_file import LOGITS, encoder_of
from laconic.runtimes.encoder_decoder_graph import SHIFT, read_encoder_decoder
from laconic.runtimes.low_bit_cache import name_present
from laconic.runtimes.low_rank_adapter import AdapterStack, LowRankAdapter
from laconic.runtimes.openvino import OpenVino, core, find_compute, make_properties, ov
from laconic.runtimes.prefix_file import BlockPart
from laconic.runtimes.runtime import Compute
from laconic.runtimes.source_encoder import SourceEncoder
from laconic.runtimes.stateful_graph import FEATURES, IDS, POSITIONS, read_cache_shape, read_vocabulary
from laconic.tasks.decoder_tensors import DECODER_INPUT_IDS

PROBED, SHIFTED = 24, 9
"""Tokens of the text and of the padding with which a graph is tried."""
AGREEMENT = 0.05
"""Logits differ by less than this share of the largest, with padding in front or without; BF16 rounds to 0.004."""
HEADROOM = 64
"""Tokens that a cache can grow by before it is placed anew."""
WASTE = 4
"""Memory of a cache is given back where it could hold so many times as much."""
NO_SOURCE: Mapping[str, Array] = {}
"""What a decoder without an encoder reads beside tokens."""


@dataclass(frozen=True)
class CachePart:
    """A part of a cache: an input of the graph. heads, size: of a token; type: of its numbers."""

    name: str
    heads: int
    size: int
    type: np.dtype[np.generic]

    @classmethod
    def read(cls, past: "ov.op.Parameter") -> "CachePart":
        """Read a part off the input that holds it."""
        return cls(past.get_friendly_name(), *read_cache_shape(past), np.dtype(past.get_element_type().to_dtype()))


class DecoderRequests:
    """Two requests of a compiled decoder, in turns: what one wrote is what the other reads, without a copy.

    The cache is written to memory of ours, with room to grow, which goes back to the system at once: the engine's own,
    which is another with each token, took three times the memory (SmolLM2-135M, 8 rows of 450 tokens, 2026.4).
    """

    def __init__(
        self, compiled: "ov.CompiledModel", cache: Sequence[CachePart], products: Sequence[LinearProduct] = ()
    ) -> None:
        """products: those that the graph computes adapters beside."""
        self.cache = cache
        self._requests = [compiled.create_infer_request() for _ in range(2)]
        self._adapters = AdapterStack(products)
        self._bound: list[Arrays] = [{}, {}]
        self._buffers = [[make_array(0, part.type) for part in cache] for _ in range(2)]
        self._presents = [compiled.output(name_present(part.name)) for part in cache]
        self._logits = compiled.output(LOGITS)
        self._read = {name for each in compiled.inputs for name in each.get_names()}

    def run(
        self,
        ids: Array,
        lengths: Array,
        past: Sequence[Array],
        source: Mapping[str, Array] = NO_SOURCE,
        kept: int = 1,
        adapters: Sequence[LowRankAdapter | None] = (),
    ) -> tuple[Array, list[Array]]:
        """Read tokens behind the past of each row, [rows, tokens]. lengths: of the rows' past, whose tokens are at its
        end. source: what an encoder made of the rows' sources. kept: tokens, from the last one, of which the logits are
        computed. adapters: of the rows, where not all are written by the base alone. Return the logits, [rows, kept,
        vocabulary], and the new past; both are overwritten by the next call but one."""
        self._requests.reverse()
        self._buffers.reverse()
        self._bound.reverse()
        request = self._requests[0]
        rows, tokens = ids.shape
        width = past[0].shape[2]
        padding = np.zeros((rows, 1, 1, width + tokens), np.float32)
        padding[..., :width][np.arange(width) < (width - lengths)[:, None, None, None]] = HIDING
        places = {POSITIONS: lengths[:, None] + np.arange(tokens), SHIFT: (width - lengths)[:, None]}
        presents = [self._place(index, rows, width + tokens) for index in range(len(self._presents))]
        for output, present in zip(self._presents, presents, strict=True):
            request.set_tensor(output, ov.Tensor(present, shared_memory=True))
        inputs = {IDS: ids, DECODER_INPUT_IDS: ids, PADDING: padding, KEPT: np.array([-kept]), **places, **source}
        inputs |= {part.name: array for part, array in zip(self.cache, past, strict=True)}
        inputs |= {MASK: self._adapters.choose(adapters or [None] * rows)}
        if self._bound[0] is not self._adapters.tensors:  # set once, not with each step: SmolLM2 has 420
            self._bound[0] = self._adapters.tensors
            for name, array in self._bound[0].items():
                request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        request.infer({name: array for name, array in inputs.items() if name in self._read}, share_inputs=True)
        return request.get_tensor(self._logits).data, presents

    def arrange(self, rows: Sequence[tuple[Sequence[Array], int, int]]) -> list[Array]:
        """Make a batch of rows. rows: for each the past that it is in, its place there and its length. Return its past,
        padded to the longest row; rows of the last call's result may be among them."""
        self._buffers.reverse()
        width = max((length for _, _, length in rows), default=0)
        arranged = [self._place(index, len(rows), width) for index in range(len(self.cache))]
        for place, (past, source, length) in enumerate(rows):
            for target, array in zip(arranged, past, strict=True):
                target[place, :, : width - length] = 0
                target[place, :, width - length :] = array[source, :, array.shape[2] - length :]
        return arranged

    def cut(self, past: Sequence[Array], tokens: int) -> list[Array]:
        """Return a past without its last tokens."""
        self._buffers.reverse()
        rows, _, width, _ = past[0].shape
        shorter = [self._place(index, rows, width - tokens) for index in range(len(self.cache))]
        for target, array in zip(shorter, past, strict=True):
            target[...] = array[:, :, :-tokens]
        return shorter

    def _place(self, index: int, rows: int, width: int) -> Array:
        """Return where a part of the cache is to be written: in memory that is neither too small nor far too large."""
        part = self.cache[index]
        token = rows * part.heads * part.size
        buffer = self._buffers[0][index]
        if not width * token <= buffer.size <= WASTE * (width + HEADROOM) * token:
            buffer = self._buffers[0][index] = make_array((width + HEADROOM) * token, part.type)
        return buffer[: width * token].reshape(rows, part.heads, width, part.size)

    def make_past(self, rows: int, width: int) -> list[Array]:
        """Make a past of padding."""
        return [np.zeros((rows, part.heads, width, part.size), part.type) for part in self.cache]


def make_array(numbers: int, kind: np.dtype[np.generic]) -> Array:
    """Make an array in memory of its own, which goes back to the system with it."""
    return np.frombuffer(mmap(-1, kind.itemsize * max(1, numbers)), kind)[:numbers]


@dataclass(frozen=True)
class OpenDecoder:
    """A decoder that is ready. prompts, rows: what prompts are read with, one at a time, and what the batch is.
    encoder: of an encoder-decoder, or the tower of a vision-language model. products: those that adapters are computed
    beside. compute: the arithmetic that it runs in."""

    prompts: DecoderRequests
    rows: DecoderRequests
    vocabulary: int
    encoder: SourceEncoder | None = None
    products: Sequence[LinearProduct] = ()
    compute: Compute = "float32"

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
    model: Path, context: int, threads: int, compute: Compute, longest: int | None, has_adapters: bool
) -> "Future[OpenDecoder]":
    """Open a decoder in a thread of its own, so that others write meanwhile. longest: of an encoder-decoder, as
    `open_encoder_decoder` takes it; None for any other. The rest as `open_decoder` takes it."""
    future: Future[OpenDecoder] = Future()

    def work() -> None:
        try:
            if longest is None:
                future.set_result(open_decoder(model, context, threads, compute, has_adapters=has_adapters))
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
