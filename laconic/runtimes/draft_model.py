"""Drafts of the next tokens of a text from a smaller model."""

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from laconic.runtimes.draft_source import DraftSource
from laconic.runtimes.generator import PIECE

if TYPE_CHECKING:
    from laconic.runtimes.decoder_requests import DecoderRequests

SURE = 0.4
"""The least probability that the draft model gives a token which is proposed behind others: what it is less sure of is
mostly wrong, as are the tokens behind it."""


class DraftModel:
    """A smaller model with the same tokens, and its cache, which holds one text: what a text shares with the one before
    is not read again, so that a prompt is read with its first drafts, and wrong tokens of a draft are dropped.

    context: the most tokens that it takes.
    """

    def __init__(self, requests: "DecoderRequests", context: int) -> None:
        self._requests = requests
        self._context = context
        self._read: list[int] = []
        self._past = requests.make_past(1, 0)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Propose the likeliest tokens behind a text, at most so many, the first even if it is not sure of it; none
        while a prompt is read, a piece with each call, or where the text has no room."""
        most = min(most, self._context - len(tokens))
        self._rewind(tokens)
        draft: list[int] = []
        unread = list(tokens[len(self._read) :])
        if len(unread) > PIECE:
            self._predict(unread[:PIECE])
            return []
        while len(draft) < most:
            token, probability = self._predict(unread)
            if draft and probability < SURE:
                break
            draft.append(token)
            unread = [token]
        return draft

    def _rewind(self, tokens: Sequence[int]) -> None:
        """Drop from the cache what the text does not begin with, and its last token, whose logits are computed."""
        pairs = zip(self._read, tokens[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if dropped := len(self._read) - shared:
            self._past = self._requests.cut(self._past, dropped)
            del self._read[shared:]

    def _predict(self, tokens: Sequence[int]) -> tuple[int, float]:
        """Read tokens behind those in the cache; return the likeliest next one, and its probability."""
        length = np.array([len(self._read)], np.int64)
        logits, self._past = self._requests.run(np.array([tokens], np.int64), length, self._past)
        self._read += tokens
        scores = logits[0, -1]
        token = int(scores.argmax())
        return token, float(1 / np.exp(scores - scores[token]).sum())


class ModelDrafts(DraftSource):
    """The drafts of one text from a draft model. A token of a draft takes more time than one that is looked up, so more
    of them must be right: two of five.

    tokens: of the prompt and the text so far; the list grows while the text is written.
    """

    accepted: ClassVar[float] = 1.5
    shortest: ClassVar[int] = 2
    longest: ClassVar[int] = 8

    def __init__(self, tokens: Sequence[int], model: DraftModel) -> None:
        super().__init__()
        self._tokens = tokens
        self._model = model

    def _guess(self, most: int) -> list[int]:
        return self._model.propose(self._tokens, most)
