"""The texts in llama.cpp's cache: their numbers, and those that have ended and stay as prefixes of others."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from laconic.runtimes.llamacpp_library import TEXTS, LlamaModel


class TextPool:
    """Numbers for texts in a model's cache. Ended texts give theirs up where one is needed, the least recently used
    first."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self._free = list(range(TEXTS))
        self._ended: OrderedDict[int, Sequence[int]] = OrderedDict()

    @property
    def available(self) -> int:
        """How many texts can begin."""
        return len(self._free) + len(self._ended)

    def begin(self, tokens: Sequence[int], count: int, running: Mapping[int, Sequence[int]]) -> tuple[list[int], int]:
        """Begin a text and its copies: return their numbers, and how many tokens the first of them has in the cache
        already. tokens: of the text; the last one is left out, as its logits must be computed. running: the tokens in
        the cache of texts under way, by their number."""
        lengths = {text: count_shared(tokens[:-1], others) for text, others in (*running.items(), *self._ended.items())}
        source = max(lengths, key=lambda text: lengths[text], default=-1)
        if source in self._ended:
            self._ended.move_to_end(source)
        while len(self._free) < count:
            self._forget_oldest()
        texts = [self._free.pop() for _ in range(count)]
        if source in (-1, *texts) or not lengths[source]:
            return texts, 0
        self._model.copy(source, texts[0], lengths[source])
        return texts, lengths[source]

    def end(self, text: int, tokens: Sequence[int]) -> None:
        """End a text, which stays as a prefix. tokens: that it has in the cache."""
        self._ended[text] = tokens

    def release(self, text: int) -> None:
        """Forget a text, and give its number up."""
        self._model.forget(text)
        self._free.append(text)

    def trim(self, most: int) -> None:
        """Forget ended texts until they have at most so many tokens."""
        while sum(map(len, self._ended.values())) > max(0, most):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        text, _ = self._ended.popitem(last=False)
        self.release(text)


def count_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that two texts have in common from their beginning on."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(np.not_equal(first[:length], second[:length]))
    return int(differing[0]) if len(differing) else length
