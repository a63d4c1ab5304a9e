"""What tasks share that predict a token: the classes are the vocabulary."""

from typing import Any

import numpy as np
from tokenizers import Tokenizer

from laconic.errors import DataError
from laconic.tasks.classification import Classification


class TokenPrediction(Classification):
    """Mixin of text tasks whose answer is the distribution of one token.

    A label is a token, as text or, a whole number, by its id.
    """

    answer = "token"
    tokenizer: Tokenizer

    def label(self, index: int) -> str:
        """A token as text; a part of a character becomes the replacement character."""
        return str(self.tokenizer.decode([int(index)], skip_special_tokens=False))

    def index(self, label: Any) -> int:
        """The id of a token given by its text or its id. Raises DataError for anything but one token."""
        size = self.tokenizer.get_vocab_size()
        if isinstance(label, (int, np.integer)) and not isinstance(label, bool):
            if 0 <= label < size:
                return int(label)
            raise DataError(f"label {label!r} is no token's id; expected 0 to {size - 1}")
        if not isinstance(label, str):
            raise DataError(f"a label must be a token, as text or as its id, not {label!r}")
        known = self.tokenizer.token_to_id(label)
        ids = [known] if known is not None else self.tokenizer.encode(label, add_special_tokens=False).ids
        if len(ids) != 1:
            raise DataError(
                f"label {label!r} is {len(ids)} tokens of this model, expected one. Give a single token, with "
                f"the space before it where it has one"
            )
        return int(ids[0])
