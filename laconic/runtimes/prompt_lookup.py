"""Prompt lookup decoding (Saxena, 2023): drafts of the next tokens of a text, from the text itself."""

from collections.abc import Sequence

SIZES = (3, 2)
"""Tokens that must be the same for what followed them to be proposed, most first: one alone is followed by anything."""
SHORTEST, LONGEST = 2, 8
"""Tokens of a draft: each that is right as a whole doubles the next. Nine tokens took twice the time of one
(SmolLM2-135M in 4 bits, one thread with AVX2, OpenVINO 2026.4)."""
CREDIT, MOST_CREDIT = 8.0, 16.0
"""Wrong tokens that a text may begin with, and ever have left: one took an eighth of the time of a step."""
ACCEPTED, WRITTEN = 3.0, 1 / 8
"""What a right token of a draft adds to them, and each token of the text: so where fewer than a quarter of the drafts'
tokens are right, they end, but for a wrong one in eight tokens, about 2 % of the time."""


class PromptLookup:
    """The drafts of one text: what followed its last tokens where they stood before, latest first.

    tokens: of the prompt and the text so far; the list grows while the text is written.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._places: dict[tuple[int, ...], int] = {}
        self._known = 0
        self._length = SHORTEST
        self._credit = CREDIT

    def propose(self, most: int) -> list[int]:
        """Propose the next tokens, at most so many; none where the text repeats nothing, or drafts were wrong."""
        most = min(most, self._length, int(self._credit))
        if most < 1:
            return []
        self._note_places()
        place = self._find()
        return [] if place is None else self._copy(place, most)

    def learn(self, proposed: int, accepted: int) -> None:
        """Learn how many tokens of a draft were right, of none too: another token of the text follows them."""
        earned = accepted * ACCEPTED + (accepted + 1) * WRITTEN
        self._credit = min(MOST_CREDIT, self._credit + earned - (proposed - accepted))
        if proposed:
            self._length = min(LONGEST, 2 * self._length) if accepted == proposed else SHORTEST

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
