"""The file of a prefix cache, which a model that is opened again goes on with.

It is one of safetensors: `names`, the digests of the blocks, [blocks, 16] uint8, least recently used first; and each
part of the cache by its name, [blocks, heads, tokens, width]. Its metadata has the digest of what the numbers depend
on. It holds numbers alone, and nothing of it is executed.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from laconic.arrays import Array
from laconic.errors import describe_error
from laconic.files import replace_file
from laconic.hashing import environment_digest, hash_of

KEY = "key"
DTYPES = {"float32": "F32", "float16": "F16", "uint8": "U8"}
"""The names that safetensors has for the types of a cache."""

log = logging.getLogger("laconic.prefixes")

Blocks = Mapping[bytes, Sequence[Array]]
"""By the digest of a block, its keys and values, [heads, tokens, width] each; least recently used first."""


@dataclass(frozen=True)
class BlockPart:
    """A part of every block. name: in the file. shape: of one block, [heads, tokens, width]. dtype: of numpy."""

    name: str
    shape: tuple[int, ...]
    dtype: str


DIGESTS = BlockPart("names", (16,), "uint8")


class PrefixFile:
    """Where the prefix cache of a model is kept. Whatever is wrong with the file costs a line of the log.

    is_read: whether it was, before which nothing is written in its place.
    """

    def __init__(self, path: Path, model: str) -> None:
        """model: its digest."""
        self.is_read = False
        self._path = path
        self._model = model
        self._parts: Sequence[BlockPart] = ()
        self._key = ""

    def read(self, parts: Sequence[BlockPart], arithmetic: str, most: int) -> Blocks:
        """Read the blocks that were used last, at most so many; none where the file is not this model's, or damaged.
        parts: of a block. arithmetic: that they were computed in."""
        self.is_read, self._parts = True, parts
        described = [(part.name, part.shape, part.dtype) for part in parts]
        self._key = hash_of("prefixes", self._model, described, arithmetic, environment_digest())
        try:
            return self._read(most)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, SafetensorError) as error:
            log.warning("%s is of no use, so that no prefix is cached yet: %s", self._path, describe_error(error))
            return {}

    def write(self, blocks: Blocks) -> None:
        """Write all blocks, in place of an earlier file."""
        if not self.is_read or not blocks:
            return
        try:
            replace_file(self._path, self._pack(blocks))
        except OSError as error:
            log.warning("the prefix cache is not kept in %s: %s", self._path, describe_error(error))

    def _read(self, most: int) -> Blocks:
        blocks: dict[bytes, list[Array]] = {}
        with safe_open(self._path, "numpy") as file:
            if (file.metadata() or {}).get(KEY) != self._key:
                raise ValueError("it is of another model, version or arithmetic")
            count = int(file.get_slice(DIGESTS.name).get_shape()[0])
            first = count - min(count, most)
            for part in (DIGESTS, *self._parts):
                stored = file.get_slice(part.name)
                if list(stored.get_shape()) != [count, *part.shape] or stored.get_dtype() != DTYPES[part.dtype]:
                    raise ValueError(f"{part.name} has another shape or type")
                arrays = stored[first:]
                if not np.isfinite(arrays).all():
                    raise ValueError(f"{part.name} has values that are no numbers")
                if part is DIGESTS:
                    blocks = {name.tobytes(): [] for name in arrays}
                    continue
                for block, array in zip(blocks.values(), arrays, strict=True):
                    block.append(array.copy())
        return blocks

    def _pack(self, blocks: Blocks) -> Iterator[bytes | memoryview]:
        """Yield the file in pieces, so that the cache is not in memory twice."""
        header: dict[str, object] = {"__metadata__": {KEY: self._key}}
        start = 0
        for part in (DIGESTS, *self._parts):
            shape = [len(blocks), *part.shape]
            stop = start + math.prod(shape) * np.dtype(part.dtype).itemsize
            header[part.name] = {"dtype": DTYPES[part.dtype], "shape": shape, "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little")
        yield text
        yield from blocks
        for index in range(len(self._parts)):
            for block in blocks.values():
                yield np.ascontiguousarray(block[index]).data
