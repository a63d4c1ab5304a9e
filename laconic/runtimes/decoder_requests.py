"""A compiled decoder with a cache that goes from call to call, opened on the CPU by OpenVINO."""

from collections.abc import Sequence
from dataclasses import dataclass
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


class DecoderRequests:
    """Two requests of a compiled decoder, in turns: what one wrote is what the other reads, without a copy."""

    def __init__(self, compiled: "ov.CompiledModel", cache: CacheShape) -> None:
        self.cache = cache
        self._requests = [compiled.create_infer_request() for _ in range(2)]
        self._presents = [compiled.output(present_name(index)) for index in range(len(cache.layers))]
        self._logits = compiled.output(LOGITS)

    def run(self, ids: Array, lengths: Array, past: Sequence[Array]) -> tuple[Array, list[Array]]:
        """Read tokens behind the past of each row, [rows, tokens]. lengths: of the rows' past, whose tokens are at its
        end. Return the logits of the last tokens, [rows, vocabulary], and the new past; both are overwritten by the
        next call but one."""
        self._requests.reverse()
        request = self._requests[0]
        rows, tokens = ids.shape
        width = past[0].shape[2]
        padding = np.zeros((rows, 1, 1, width + tokens), np.float32)
        padding[..., :width][np.arange(width) < (width - lengths)[:, None, None, None]] = HIDING
        positions = lengths[:, None] + np.arange(tokens)
        inputs = {IDS: ids, POSITIONS: positions, PADDING: padding}
        request.infer(inputs | {past_name(index): array for index, array in enumerate(past)}, share_inputs=True)
        return request.get_tensor(self._logits).data[:, 0], [request.get_tensor(out).data for out in self._presents]

    def make_past(self, rows: int, width: int) -> list[Array]:
        """Make a past of padding."""
        return [np.zeros((rows, heads, width, size), np.float32) for heads, size in self.cache.layers]


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
