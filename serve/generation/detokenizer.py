"""From tokens to text while they come, and the stop strings that end a text."""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of an incomplete character become."""
HELD = 8
"""Tokens that are held back at most: a character has four bytes, so what is broken then stays so."""
CONTEXT = 4
"""Tokens that a token is decoded behind: whether a word begins with a space shows only there."""


class Detokenizer:
    """Decodes the tokens of one text as they come. Characters of which the last bytes are missing are held back.

    Some tokenizers decode a token in another way after others than alone, so a piece of text is what a window of
    tokens decodes to with the new ones, less what it decodes to without. prompt: the tokens before the text. shown:
    special tokens that are text, as which no others are.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), shown: Mapping[int, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown or {}
        self._window = list(prompt[-CONTEXT:])
        self._known = len(self._window)

    def add(self, token: int) -> str:
        """Add a token; return the text that it completes."""
        if token in self._shown:
            text = self.finish() + self._shown[token]
            self._window, self._known = [], 0
            return text
        self._window.append(token)
        text = self._decode_new()
        if text.endswith(BROKEN) and len(self._window) - self._known <= HELD:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._take(self._decode_new())

    def _decode_new(self) -> str:
        before = self._tokenizer.decode(self._window[: self._known])
        return self._tokenizer.decode(self._window)[len(before) :]

    def _take(self, text: str) -> str:
        self._window = self._window[min(self._known, max(0, len(self._window) - CONTEXT)) :]
        self._known = len(self._window)
        return text


class StopMatcher:
    """Finds the first of several strings in a text that comes in pieces, and holds back what may be the beginning of
    one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Add a piece; return the text in which no stop string can begin any more, and whether one ended the text."""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            return self._held[: min(places)], True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, False

    def finish(self) -> str:
        """Return the text that was held back."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, stop: str) -> int:
        """Return how many characters at the end of the text may begin this string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
