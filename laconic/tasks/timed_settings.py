"""Greedy generation of texts with timestamps, as Whisper was trained to write them."""

from typing import Self

import numpy as np

from laconic.arrays import Array
from laconic.tasks.generation_settings import GenerationSettings, TimestampSettings


class TimedSettings(GenerationSettings):
    """The settings of answers with timestamps, by the rules of Whisper (Radford et al., arXiv 2212.04356).

    An answer begins with a timestamp. Timestamps stand in pairs, the end of a text and the beginning of the next, but
    for the first and the last one; none is earlier than one before it. Where all of them together are likelier than
    any other token, one of them follows.
    """

    timestamps: TimestampSettings

    @classmethod
    def add_to(cls, settings: GenerationSettings) -> Self | None:
        """Return the same settings for answers with timestamps; None where the model has no such tokens."""
        timestamps = settings.timestamps
        if timestamps is None:
            return None
        forced = tuple(each for each in settings.forced_decoder_ids if each != timestamps.first - 1)
        changes = {"forced_decoder_ids": forced, "max_new_tokens": timestamps.max_new_tokens}
        return cls.model_validate(settings.model_dump() | changes)

    def restrict(self, logits: Array, written: Array) -> Array:
        scores = super().restrict(logits, written)
        if written.shape[1] <= self.begin:
            return scores
        scores[:, self.timestamps.first - 1] = -np.inf
        for row, text in zip(scores, written[:, 1 + self.begin :].tolist(), strict=True):
            self._restrict_row(row, text)
        return scores

    def _restrict_row(self, scores: Array, text: list[int]) -> None:
        """Leave the tokens that may follow a text, in place. scores: [vocabulary]."""
        first = self.timestamps.first
        is_time = [token >= first for token in text[-2:]]
        times = [token for token in text if token >= first]
        is_end = is_time == [False, True]
        if not text:
            scores[:first] = -np.inf
            if self.timestamps.latest_start is not None:
                scores[first + self.timestamps.latest_start + 1 :] = -np.inf
        elif is_end:
            scores[: min(self.eos_token_id, default=first)] = -np.inf  # the next text begins, or all ends
        elif is_time[-1]:
            scores[first:] = -np.inf
        if times:
            scores[first : times[-1] + (not is_end)] = -np.inf  # a text takes time
        shares = np.exp(scores - scores.max())
        if shares[first:].sum() > shares[:first].max():
            scores[:first] = -np.inf
