"""Prompt lookup decoding (Saxena, 2023): drafts of the next tokens of a text, from the text itself."""

from collections.abc import Sequence
from typing import ClassVar

from laconic.runtimes.draft_source import DraftSource

SIZES = (3, 2)
"""Tokens that must be the same for what followed them to be proposed, most first: one alone is followed by anything."""


class PromptLookup(DraftSource):
    """The drafts of one text: what followed its last tokens where they stood before, latest first. Nine tokens took
    twice the time of one (SmolLM2-135M in 4 bits, one thread with AVX2, OpenVINO 2026.4), so there are eight at most.

    tokens: of the prompt and the text so far; the list grows while the text is written.
    """

    accepted: ClassVar[float] = 3.0
    shortest: ClassVar[int] = 2
    longest: ClassVar[int] = 8

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__()
        self._tokens = tokens
        self._places: dict[tuple[int, ...], int] = {}
        self._known = 0

    def _guess(self, most: int) -> list[int]:
        self._note_places()
        place = self._find()
        return [] if place is None else self._copy(place, most)

    def _note_places(self) -> None:
        """Note what stands in front of each token since the last time."""
        for place in range(self._known, len(self._tokens)):
            for size in SIZES:
                if place >= size:
                    self._places[tuple(self._tokens[place - size : place])] = place
        self._known = len(self._tokens)

    def _find(self) -> int | None:
        """Find the place behind the last tokens where they stood before."""
        for size in SIZES:
            place = self._places.get(tuple(self._tokens[-size:]))
            if place is not None:
                return place
        return None

    def _copy(self, place: int, count: int) -> list[int]:
        """Copy so many tokens from a place on, and from the copy itself where the text ends before."""
        draft: list[int] = []
        for index in range(place, place + count):
            draft.append(self._tokens[index] if index < len(self._tokens) else draft[index - len(self._tokens)])
        return draft
