"""A cache of prefixes: keys and values of texts that were read, in blocks of tokens."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np

from laconic.arrays import Array


class PrefixCache:
    """Blocks of keys and values, each found by the digest of all tokens up to its end, and of the adapter that read
    them. Of a text that begins as another did, the blocks that both share need not be computed again. Without keys and
    values it tells what an engine has that keeps them itself.

    block_tokens: tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[bytes, Sequence[Array]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def find(self, tokens: Sequence[int], adapter: bytes = b"") -> tuple[int, list[Array]]:
        """Find the longest beginning of a text that is in the cache, the last token left out, as its logits must be
        computed. adapter: digest of what read it; empty for the base. Return its tokens, and its keys and values,
        [1, heads, tokens, width] each."""
        keys: list[bytes] = []
        for key in self._name_blocks(tokens[:-1], adapter):
            if key not in self._blocks:
                break
            keys.append(key)
        if not keys:
            return 0, []
        self._touch(keys)
        parts = zip(*(self._blocks[key] for key in keys), strict=True)
        return len(keys) * self._block_tokens, [np.concatenate(blocks, axis=1)[None] for blocks in parts]

    def keep(self, tokens: Sequence[int], past: Sequence[Array], place: int, most: int, adapter: bytes = b"") -> None:
        """Keep a text. past: the keys and values of a batch, [rows, heads, tokens, width] each, in which those of the
        text come last; none where the engine keeps them itself. place: of its row. most: blocks that there may be, of
        all texts. adapter: as `find` takes it."""
        keys = list(self._name_blocks(tokens, adapter))[: max(0, most)]
        for number, key in enumerate(keys):
            if key not in self._blocks:
                start = number * self._block_tokens - len(tokens)
                stop = start + self._block_tokens
                self._blocks[key] = [array[place, :, start : stop or None].copy() for array in past]
        self._touch(keys)
        self.trim(most)

    @property
    def blocks(self) -> Mapping[bytes, Sequence[Array]]:
        """The blocks by their digests, least recently used first; [heads, tokens, width] each."""
        return self._blocks

    def restore(self, blocks: Mapping[bytes, Sequence[Array]]) -> None:
        """Add the blocks of an earlier cache of the same model, as those that were used least recently."""
        self._blocks = OrderedDict({**blocks, **self._blocks})

    def trim(self, most: int) -> None:
        """Forget what was used least recently, up to so many blocks."""
        while len(self._blocks) > max(0, most):
            self._blocks.popitem(last=False)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Note that blocks were used: the first of a text last, since those behind it are of no use without it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _name_blocks(self, tokens: Sequence[int], adapter: bytes) -> Iterator[bytes]:
        """Yield the digests of the whole blocks of a text that was read with an adapter."""
        key = adapter
        for stop in range(self._block_tokens, len(tokens) + 1, self._block_tokens):
            block = np.array(tokens[stop - self._block_tokens : stop], np.int64)
            key = blake2b(key + block.tobytes(), digest_size=16).digest()
            yield key
