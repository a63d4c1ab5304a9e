"""The characters that a speech model writes with, and their grouping from frames to text."""

from collections.abc import Sequence
from itertools import groupby

from pydantic import BaseModel, ConfigDict

from laconic.errors import DataError


class CtcVocabulary(BaseModel):
    """The tokens of connectionist temporal classification (Graves et al., 2006).

    tokens: by id. blank: the id that separates repeated tokens and is not written. delimiter: the token between words.
    upper: whether texts are put into capitals before they are looked up, and answers are in small letters. unknown: the
    id of characters that have none; None where the model has no such token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: tuple[str, ...]
    blank: int
    delimiter: str
    upper: bool = False
    unknown: int | None = None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the likeliest token of each frame: repetitions count once, blanks not at all."""
        kept = [token for token, _ in groupby(ids) if token != self.blank]
        names = [self.tokens[token] if token < len(self.tokens) else "" for token in kept]
        text = "".join(" " if name == self.delimiter else name for name in names).strip()
        return text.lower() if self.upper else text

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's characters. Raises DataError for one that the model cannot write."""
        known = {token: index for index, token in enumerate(self.tokens)}
        ids = []
        for character in text.upper() if self.upper else text:
            found = known.get(self.delimiter if character == " " else character, self.unknown)
            if found is None:
                raise DataError(f"the model has no token for {character!r} in {text[:80]!r}. Leave the character out")
            ids.append(found)
        return ids
