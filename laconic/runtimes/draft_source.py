"""The interface of what drafts the next tokens of a text, and how many it may (speculative decoding: Leviathan et al.,
2023)."""

from abc import ABC, abstractmethod
from typing import ClassVar

CREDIT, MOST_CREDIT = 8.0, 16.0
"""Wrong tokens that a text may begin with, and ever have left: one took an eighth of the time of a step."""
WRITTEN = 1 / 8
"""What each token of the text adds to them: so where drafts are wrong, they end, but for a wrong one in eight tokens,
about 2 % of the time."""


class DraftSource(ABC):
    """Drafts of one text. Each that is right as a whole doubles the length of the next.

    accepted: what a right token of a draft adds to the wrong tokens that the text may have; drafts go on where at least
    1 / (1 + accepted) of their tokens are right. shortest, longest: tokens of a draft.
    """

    accepted: ClassVar[float]
    shortest: ClassVar[int]
    longest: ClassVar[int]

    def __init__(self) -> None:
        self._length = self.shortest
        self._credit = CREDIT

    def propose(self, most: int) -> list[int]:
        """Propose the next tokens, at most so many; none where there is no guess, or drafts were wrong."""
        most = min(most, self._length, int(self._credit))
        return self._guess(most) if most > 0 else []

    def learn(self, proposed: int, accepted: int) -> None:
        """Learn how many tokens of a draft were right, of none too: another token of the text follows them."""
        earned = accepted * self.accepted + (accepted + 1) * WRITTEN
        self._credit = min(MOST_CREDIT, self._credit + earned - (proposed - accepted))
        if proposed:
            self._length = min(self.longest, 2 * self._length) if accepted == proposed else self.shortest

    @abstractmethod
    def _guess(self, most: int) -> list[int]:
        """Guess the next tokens, at most so many, which are one or more."""
