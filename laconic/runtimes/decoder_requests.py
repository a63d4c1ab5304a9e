"""A compiled decoder with a cache that goes from call to call, opened on the CPU by OpenVINO."""

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import numpy as np

from laconic.arrays import Array
from laconic.errors import RuntimeFailure
from laconic.runtimes.batched_graph import HIDING, PADDING, read_batched
from laconic.runtimes.decoder_file import LOGITS, past_name, present_name
from laconic.runtimes.openvino import HINTS, OpenVino, core, ov
from laconic.runtimes.runtime import Compute
from laconic.runtimes.stateful_graph import IDS, POSITIONS, CacheShape, read_cache, read_vocabulary

PROBED, SHIFT = 24, 9
"""Tokens of the text and of the padding with which a graph is tried."""
AGREEMENT = 0.05
"""Logits differ by less than this share of the largest, with padding in front or without; BF16 rounds to 0.004."""
HEADROOM = 64
"""Tokens that a cache can grow by before it is placed anew."""
WASTE = 4
"""Memory of a cache is given back where it could hold so many times as much."""


class DecoderRequests:
    """Two requests of a compiled decoder, in turns: what one wrote is what the other reads, without a copy.

    The cache is written to memory of ours, with room to grow, which goes back to the system at once: the engine's own,
    which is another with each token, took three times the memory (SmolLM2-135M, 8 rows of 450 tokens, 2026.4).
    """

    def __init__(self, compiled: "ov.CompiledModel", cache: CacheShape) -> None:
        self.cache = cache
        self._requests = [compiled.create_infer_request() for _ in range(2)]
        self._buffers = [[np.empty(0, np.float32) for _ in cache.layers] for _ in range(2)]
        self._presents = [compiled.output(present_name(index)) for index in range(len(cache.layers))]
        self._logits = compiled.output(LOGITS)

    def run(self, ids: Array, lengths: Array, past: Sequence[Array]) -> tuple[Array, list[Array]]:
        """Read tokens behind the past of each row, [rows, tokens]. lengths: of the rows' past, whose tokens are at its
        end. Return the logits of the last tokens, [rows, vocabulary], and the new past; both are overwritten by the
        next call but one."""
        self._requests.reverse()
        self._buffers.reverse()
        request = self._requests[0]
        rows, tokens = ids.shape
        width = past[0].shape[2]
        padding = np.zeros((rows, 1, 1, width + tokens), np.float32)
        padding[..., :width][np.arange(width) < (width - lengths)[:, None, None, None]] = HIDING
        positions = lengths[:, None] + np.arange(tokens)
        presents = [self._place(index, rows, width + tokens) for index in range(len(self._presents))]
        for output, present in zip(self._presents, presents, strict=True):
            request.set_tensor(output, ov.Tensor(present, shared_memory=True))
        inputs = {IDS: ids, POSITIONS: positions, PADDING: padding}
        request.infer(inputs | {past_name(index): array for index, array in enumerate(past)}, share_inputs=True)
        return request.get_tensor(self._logits).data[:, 0], presents

    def arrange(self, rows: Sequence[tuple[Sequence[Array], int, int]]) -> list[Array]:
        """Make a batch of rows. rows: for each the past that it is in, its place there and its length. Return its past,
        padded to the longest row; rows of the last call's result may be among them."""
        self._buffers.reverse()
        width = max((length for _, _, length in rows), default=0)
        arranged = [self._place(index, len(rows), width) for index in range(len(self.cache.layers))]
        for place, (past, source, length) in enumerate(rows):
            for target, array in zip(arranged, past, strict=True):
                target[place, :, : width - length] = 0
                target[place, :, width - length :] = array[source, :, array.shape[2] - length :]
        return arranged

    def _place(self, index: int, rows: int, width: int) -> Array:
        """Return where a part of the cache is to be written: in memory that is neither too small nor far too large."""
        heads, size = self.cache.layers[index]
        token = rows * heads * size
        buffer = self._buffers[0][index]
        if not width * token <= buffer.size <= WASTE * (width + HEADROOM) * token:
            buffer = self._buffers[0][index] = make_array((width + HEADROOM) * token)
        return buffer[: width * token].reshape(rows, heads, width, size)

    def make_past(self, rows: int, width: int) -> list[Array]:
        """Make a past of padding."""
        return [np.zeros((rows, heads, width, size), np.float32) for heads, size in self.cache.layers]


def make_array(numbers: int) -> Array:
    """Make an array in memory of its own, which goes back to the system with it."""
    return np.frombuffer(mmap(-1, 4 * max(1, numbers)), np.float32)[:numbers]


@dataclass(frozen=True)
class OpenDecoder:
    """A decoder that is ready. prompts, rows: what prompts are read with, one at a time, and what the batch is."""

    prompts: DecoderRequests
    rows: DecoderRequests
    vocabulary: int


def open_decoder(model: Path, context: int, threads: int, compute: Compute) -> OpenDecoder:
    """Open a decoder in ONNX. context: the most tokens that it takes. Raises RuntimeFailure where the graph or the
    engine refuses."""
    graph, pasts = read_batched(model)
    cache, vocabulary = read_cache(pasts), read_vocabulary(graph, model)
    properties = {
        "INFERENCE_PRECISION_HINT": HINTS[compute if compute in OpenVino().computes() else "float32"],
        "INFERENCE_NUM_THREADS": str(threads),
        "NUM_STREAMS": "1",
        "ENABLE_CPU_PINNING": "NO",
        "CPU_RUNTIME_CACHE_CAPACITY": "16",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    }
    try:
        compiled = core().compile_model(graph, "CPU", properties)
        prompts, rows = (DecoderRequests(compiled, cache) for _ in range(2))
        shift = measure_shift(rows, min(PROBED, context - 1), vocabulary)
    except Exception as error:  # the engine raises RuntimeError and its like
        raise RuntimeFailure(f"OpenVINO refuses {model.name}") from error
    if not shift <= AGREEMENT:
        raise RuntimeFailure(f"{model.name} cannot be batched: padding in front of a text changes what follows it")
    return OpenDecoder(prompts, rows, vocabulary)


def measure_shift(requests: DecoderRequests, tokens: int, vocabulary: int) -> float:
    """Measure how much padding in front of a text changes what follows it, as it does with a mask that counts from the
    beginning: the largest difference of logits, as a share of the largest."""
    if tokens < 1:
        return 0.0
    ids, none = np.arange(tokens)[None] % vocabulary, np.zeros(1, np.int64)
    past = [array.copy() for array in requests.run(ids, none, requests.make_past(1, 0))[1]]
    padded = [np.pad(array, ((0, 0), (0, 0), (SHIFT, 0), (0, 0))) for array in past]
    plain, shifted = (requests.run(ids[:, :1], none + tokens, each)[0].copy() for each in (past, padded))
    return float(np.abs(plain - shifted).max() / np.abs(plain).max())
