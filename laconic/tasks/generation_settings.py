"""Greedy generation: how the next token is chosen, by the settings of a generation_config.json of transformers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from laconic.arrays import Array

LONGEST = 4096
"""The most new tokens that an artifact may ask for."""
UNSTATED_LENGTH = 256
"""The most new tokens where generation_config.json has no limit; transformers would stop after 20, in mid-sentence."""


@dataclass(frozen=True)
class Prompt:
    """The tokens before the text of an answer. languages: those of which the model chooses the first; empty where it
    is not chosen. forced: the next."""

    languages: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()

    def __len__(self) -> int:
        return bool(self.languages) + len(self.forced)


class TimestampSettings(BaseModel):
    """Tokens that say when what follows is said, in steps from the beginning of a recording.

    first: the token of the beginning; those behind it are of one step more each, and the one before it says that an
    answer has none. latest_start: the latest step that an answer may begin with; any where None. max_new_tokens: the
    most tokens of an answer with timestamps, those of its prompt included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: PositiveInt
    latest_start: NonNegativeInt | None = None
    max_new_tokens: int = Field(ge=1, le=LONGEST)


class GenerationSettings(BaseModel):
    """The settings of greedy generation, named as in generation_config.json.

    max_new_tokens: the most tokens of an answer, its end token included. max_length: the most tokens of a prompt with
    its answer, where one model reads both; None where nothing limits it. min_new_tokens: before an answer may end.
    languages: where an answer begins with a token of its language, the tokens to choose it from; empty where it does
    not. forced_decoder_ids: the next tokens, which are not chosen, as Whisper's for the language and the task.
    forced_bos_token_id, forced_eos_token_id: the first token, and the last one of an answer of the greatest length.
    suppress_tokens: never chosen; begin_suppress_tokens: not at the beginning. repetition_penalty: divides positive
    logits, and multiplies negative ones, of tokens that the answer holds (Keskar et al., 2019). no_repeat_ngram_size:
    the length of sequences of tokens that do not occur twice. num_beams, do_sample: what transformers would do, where
    here the likeliest token is taken. timestamps: of a model that can write them, as `TimedSettings` do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    decoder_start_token_id: NonNegativeInt
    eos_token_id: tuple[NonNegativeInt, ...] = ()
    pad_token_id: NonNegativeInt = 0
    max_new_tokens: int = Field(default=UNSTATED_LENGTH, ge=1, le=LONGEST)
    max_length: PositiveInt | None = None
    min_new_tokens: NonNegativeInt = 0
    languages: tuple[NonNegativeInt, ...] = ()
    forced_decoder_ids: tuple[NonNegativeInt, ...] = ()
    forced_bos_token_id: NonNegativeInt | None = None
    forced_eos_token_id: tuple[NonNegativeInt, ...] = ()
    suppress_tokens: tuple[NonNegativeInt, ...] = ()
    begin_suppress_tokens: tuple[NonNegativeInt, ...] = ()
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    no_repeat_ngram_size: NonNegativeInt = 0
    num_beams: PositiveInt = 1
    do_sample: bool = False
    timestamps: TimestampSettings | None = None

    @classmethod
    def of_length(cls, tokens: int) -> "GenerationSettings":
        """Return the settings of answers of exactly so many tokens, to be timed."""
        return cls(decoder_start_token_id=0, max_new_tokens=tokens, min_new_tokens=tokens)

    @property
    def highest_id(self) -> int:
        """The largest id of a token that the settings name."""
        single = {self.decoder_start_token_id, self.pad_token_id, self.forced_bos_token_id or 0}
        single |= {self.timestamps.first} if self.timestamps else set()
        lists = (self.eos_token_id, self.forced_eos_token_id, self.suppress_tokens, self.begin_suppress_tokens)
        return max(single.union(*lists, self.languages, self.forced_decoder_ids))

    @property
    def forced_places(self) -> slice:
        """Where in an answer the forced tokens are."""
        return slice(self.begin - len(self.forced_decoder_ids), self.begin)

    @property
    def begin(self) -> int:
        """The tokens of an answer before its text: of its language, and the forced ones."""
        return bool(self.languages) + len(self.forced_decoder_ids)

    def find_forced(self, place: int) -> int | None:
        """Find the token at this place of an answer, where it is not chosen."""
        first = self.forced_places.start
        return self.forced_decoder_ids[place - first] if first <= place < self.begin else None

    def describe_difference(self) -> str | None:
        """Say where transformers would not choose greedily; None where it would."""
        if self.num_beams == 1 and not self.do_sample:
            return None
        how = "samples" if self.do_sample else f"searches with {self.num_beams} beams"
        return (
            f"with this generation_config.json transformers {how}, and Laconic takes the likeliest token at each step. "
            f"Its answers are those of generate(num_beams=1, do_sample=False)"
        )

    def choose(self, logits: Array, written: Array) -> Array:
        """Choose the next token of each row that is not forced, [rows] int64. logits, written: as `restrict` takes
        them."""
        return np.asarray(self.restrict(logits, written).argmax(axis=1), np.int64)

    def restrict(self, logits: Array, written: Array) -> Array:
        """Return the scores of the next token of each row that is not forced, as transformers' logits processors leave
        them, in their order.

        logits: [rows, vocabulary] float. written: the tokens so far, the start token first, [rows, tokens] int64.
        """
        new = written.shape[1] - 1 - self.begin
        scores = np.array(logits, np.float32)
        if new < 0:
            others = np.ones(scores.shape[1], bool)
            others[list(self.languages)] = False
            scores[:, others] = -np.inf
            return scores
        if self.repetition_penalty != 1:
            seen = np.take_along_axis(scores, written, axis=1)
            changed = np.where(seen < 0, seen * self.repetition_penalty, seen / self.repetition_penalty)
            np.put_along_axis(scores, written, changed.astype(np.float32), axis=1)
        if self.no_repeat_ngram_size:
            for row, tokens in zip(scores, written.tolist(), strict=True):
                row[find_repeats(tokens, self.no_repeat_ngram_size)] = -np.inf
        if new < self.min_new_tokens:
            scores[:, list(self.eos_token_id)] = -np.inf
        if new == 0 and self.forced_bos_token_id is not None:
            scores = keep_only(scores, [self.forced_bos_token_id])
        if new == self.max_new_tokens - self.begin - 1 and self.forced_eos_token_id:
            scores = keep_only(scores, list(self.forced_eos_token_id))
        scores[:, list(self.suppress_tokens)] = -np.inf
        if new == (0 if self.forced_bos_token_id is None else 1):
            scores[:, list(self.begin_suppress_tokens)] = -np.inf
        return scores


def keep_only(scores: Array, ids: list[int]) -> Array:
    """Return scores that are 0 for some tokens, and minus infinity for all others. scores: [rows, vocabulary]."""
    kept = np.full_like(scores, -np.inf)
    kept[:, ids] = 0
    return kept


def find_repeats(tokens: list[int], size: int) -> list[int]:
    """Find the tokens that would end a sequence of `size` tokens which occurs in `tokens` already."""
    if len(tokens) + 1 < size:
        return []
    begun = tokens[len(tokens) + 1 - size :]
    return [
        tokens[start + size - 1] for start in range(len(tokens) - size + 1) if tokens[start : start + size - 1] == begun
    ]


def as_ids(value: Any) -> tuple[int, ...]:
    """Return the ids of a setting that is one id, a list of them, or nothing."""
    if value is None:
        return ()
    return tuple(map(int, value)) if isinstance(value, (list, tuple)) else (int(value),)
