"""The requests of a compiled decoder with a cache that goes from call to call, on the CPU by OpenVINO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.runtimes.adapter_graph import MASK, LinearProduct
from laconic.runtimes.batched_graph import HIDING, KEPT, PADDING
from laconic.runtimes.decoder_file import LOGITS
from laconic.runtimes.encoder_decoder_graph import SHIFT
from laconic.runtimes.low_bit_cache import name_present
from laconic.runtimes.low_rank_adapter import AdapterStack, LowRankAdapter
from laconic.runtimes.openvino import ov
from laconic.runtimes.stateful_graph import IDS, POSITIONS, read_cache_shape
from laconic.tasks.decoder_tensors import DECODER_INPUT_IDS

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
