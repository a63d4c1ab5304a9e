"""A text as tokens, with those that are learned."""

from dataclasses import dataclass

import numpy as np

from laconic.arrays import Array


@dataclass(frozen=True)
class TokenizedText:
    """ids: [tokens] int64. learned: whether each token is a target, [tokens] bool; the first one never is."""

    ids: Array
    learned: Array

    @classmethod
    def of(cls, ids: Array) -> "TokenizedText":
        """Make a text of which every token is learned."""
        return cls(ids, np.ones(len(ids), bool))

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, start: int, stop: int) -> "TokenizedText":
        """Cut out the tokens from start to stop."""
        return TokenizedText(self.ids[start:stop], self.learned[start:stop])

    @property
    def count(self) -> int:
        """How many tokens are learned."""
        return int(self.learned[1:].sum())
