"""Partly filled blocks of the prefix cache that an engine keeps, and which requests would write into the same one."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from laconic.arrays import Array


class OpenBlocks:
    """Which texts have ended within a block of the cache. OpenVINO GenAI lets all requests that continue such a text
    write into this block, so that the answers of several at once are wrong (2026.4); that of one alone is right.

    block_tokens: tokens of a block. most: texts that are remembered; the engine has no more open blocks than blocks.
    """

    def __init__(self, block_tokens: int, most: int) -> None:
        self._block_tokens = block_tokens
        self._most = most
        self._ended: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def end(self, text: Array) -> None:
        """Note that a text, [tokens], has ended. Its last token may not be in the cache, so that the text without it
        is noted as well."""
        for name in self._name_ends(text, max(0, len(text) - 1), len(text)):
            self._touch(name)
        while len(self._ended) > self._most:
            self._ended.popitem(last=False)

    def close(self, text: Array) -> None:
        """Note that the engine has no open block at the end of a text, [tokens], any more."""
        for name in self._name_ends(text, len(text), len(text)):
            self._ended.pop(name, None)

    def find(self, prompt: Array, start: int) -> int:
        """Find the shortest text that ended in the block that begins at `start`, and that a prompt, [tokens],
        continues. Return its length; 0 where there is none."""
        stop = min(len(prompt) - 1, start + self._block_tokens - 1)
        names = self._name_ends(prompt, start + 1, stop)
        return next((length for length, name in enumerate(names, start + 1) if name in self._ended), 0)

    def would_share(self, prompt: Array, under_way: Iterable[Array]) -> bool:
        """Return whether a prompt, [tokens], and a text under way, [tokens], would write into one block: both begin
        with a text that ended, or ends now, within the block in which they part."""
        parts: set[tuple[int, int]] = set()
        for text in under_way:
            common = count_common(prompt, text)
            start, stop = common - common % self._block_tokens, min(common, len(prompt) - 1)
            if any(start < length <= stop for length in (len(text) - 1, len(text))):  # the last may not be computed
                return True
            parts.add((start, stop))
        names = {name for start, stop in parts for name in self._name_ends(prompt, start, stop)}
        shared = names & self._ended.keys()
        for name in shared:
            self._touch(name)
        return bool(shared)

    def _name_ends(self, text: Array, start: int, stop: int) -> Iterator[bytes]:
        """Yield the digests of the beginnings of a text, from `start` to `stop` tokens, that end within a block."""
        whole = blake2b(text[:start].tobytes(), digest_size=16)
        for length in range(start, stop + 1):
            if length % self._block_tokens:
                yield whole.digest()
            whole.update(text[length : length + 1].tobytes())

    def _touch(self, name: bytes) -> None:
        self._ended[name] = None
        self._ended.move_to_end(name)


def count_common(one: Array, other: Array) -> int:
    """Count the tokens that two texts, [tokens] each, begin with alike."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
