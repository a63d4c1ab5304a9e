"""A question with as much of its context as a model takes, tokenized."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from laconic.tasks.text import Tokens

OVERLAP = 128
"""The most tokens that two neighbouring windows of a context share, as in transformers' pipelines."""

Token = tuple[int, int, tuple[int, int]]
"""The id of a token of the context, its type, and the characters of its word."""


@dataclass(frozen=True)
class Passage(Tokens):
    """The tokens of a question and of a window of its context.

    types: of each token. context: the whole one. first: the position of the window's first token. words: the characters
    from which and to which the word of each of the window's tokens goes in the context.
    """

    types: tuple[int, ...]
    context: str
    first: int
    words: tuple[tuple[int, int], ...]

    @property
    def type_ids(self) -> list[int]:
        return list(self.types)

    @property
    def last(self) -> int:
        """The position of the window's last token."""
        return self.first + max(len(self.words), 1) - 1

    def find_characters(self, low: int, high: int) -> tuple[int, int]:
        """The characters of the context from the word of one position to that of another."""
        if not self.words:
            return 0, 0
        return self.words[low - self.first][0], self.words[high - self.first][1]


def make_passages(encoding: Encoding, context: str) -> list[Passage]:
    """The windows of a context, overlapping by OVERLAP tokens, or by half where a window has fewer than twice as many.

    encoding: of the question and the context, which is truncated and is the second of both.
    """
    inside = find_context(encoding)
    if not inside:
        return [Passage(tuple(encoding.ids), tuple(encoding.type_ids), context, 0, ())]
    first, stop = inside[0], inside[-1] + 1
    tokens = read_tokens([encoding, *encoding.overflowing])
    room = len(inside)
    step = room - min(OVERLAP, room // 2)

    def make(window: Sequence[Token]) -> Passage:
        ids, types, words = zip(*window, strict=True)
        return Passage(
            (*encoding.ids[:first], *ids, *encoding.ids[stop:]),
            (*encoding.type_ids[:first], *types, *encoding.type_ids[stop:]),
            context,
            first,
            words,
        )

    return [make(tokens[start : start + room]) for start in range(0, max(len(tokens) - room, 0) + step, step)]


def read_tokens(encodings: Sequence[Encoding]) -> list[Token]:
    """The tokens of the context in all parts of a truncated encoding."""
    found = []
    words: dict[int, tuple[int, int]] = {}
    for encoding in encodings:
        ids, types, word_ids, offsets = encoding.ids, encoding.type_ids, encoding.word_ids, encoding.offsets
        for index in find_context(encoding):
            word, (begin, end) = word_ids[index], offsets[index]
            if word is not None:
                low, high = words.get(word, (begin, end))
                words[word] = min(low, begin), max(high, end)
            found.append((ids[index], types[index], word, (begin, end)))
    return [(one, kind, own if word is None else words[word]) for one, kind, word, own in found]


def find_context(encoding: Encoding) -> list[int]:
    """The positions of the context's tokens."""
    return [index for index, part in enumerate(encoding.sequence_ids) if part == 1]
