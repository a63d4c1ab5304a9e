"""Choosing tokens from a model's scores.

Scores are changed in the order of transformers and vLLM: biases, grammar, penalties (repetition, frequency, presence),
temperature, top_k, top_p, min_p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laconic.arrays import Array
from laconic.errors import InputError
from laconic.runtimes.generator import FinishReason, GenerationRequest, Sampling
from laconic.runtimes.grammar import GrammarMatch
from laconic.tasks.generation_settings import GenerationSettings, keep_only

COLDEST = 1e-3
"""The least temperature that tokens are drawn with: below it the likeliest has all of the probability anyway."""


@dataclass(frozen=True)
class ChosenToken:
    """A token, with the logarithms of the probabilities that the model gave it and the likeliest ones; `finish_reason`
    as in `TokenEvent`. token: None where a grammar lets none follow."""

    token: int | None
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None


class TokenChooser:
    """Chooses the tokens of one choice of a request.

    tokens: of the prompt, and those chosen so far. prompt: the tokens before it. match: of its grammar, if it has one.
    settings: of an encoder-decoder, which says what an answer begins with and what it never holds; its repetition
    penalty is the request's.
    """

    def __init__(
        self,
        request: GenerationRequest,
        index: int,
        vocabulary: int,
        prompt: Sequence[int],
        match: GrammarMatch | None,
        settings: GenerationSettings | None = None,
    ) -> None:
        self.sampling = request.sampling
        self._match = match
        self._settings = settings
        self.tokens = list(prompt)
        self._random = np.random.default_rng((request.sampling.seed + index) % 2**64)
        self._seen = np.zeros(vocabulary, bool)
        self._seen[[token for token in self.tokens if token >= 0]] = True  # below 0 are patches of an image
        self._counts = np.zeros(vocabulary, np.int64)
        self._written = 0

    @property
    def left(self) -> int:
        """The most tokens that may still be chosen."""
        return self.sampling.max_new_tokens - self._written

    def choose(self, logits: Array) -> ChosenToken:
        """Choose the next token. logits: [vocabulary], which are left as they are."""
        sampling = self.sampling
        scores = self._adjust(logits.astype(np.float64))
        token = int(scores.argmax())
        if scores[token] == -np.inf:
            return ChosenToken(None, 0.0, (), "length")
        if sampling.temperature >= COLDEST:
            token = self._draw(scores)
        self._written += 1
        self._seen[token] = True
        self._counts[token] += 1
        self.tokens.append(token)
        if self._match is not None:
            self._match.add(token)
        reason: FinishReason | None = "length" if self._written >= sampling.max_new_tokens else None
        if token in sampling.stop_token_ids or (self._match is not None and self._match.is_complete):
            reason = "stop"
        return ChosenToken(token, *measure_token(logits, token, sampling), reason)

    def _adjust(self, scores: Array) -> Array:
        """Apply what depends on the text so far, in place."""
        sampling = self.sampling
        if self._settings is not None:
            scores = self._restrict(scores, self._settings)
        for token, bias in sampling.logit_bias:
            scores[token] += bias
        if self._match is not None:
            scores[~self._match.find_next()] = -np.inf
        if sampling.repetition_penalty != 1:
            seen = scores[self._seen]
            factor = sampling.repetition_penalty
            scores[self._seen] = np.where(seen < 0, seen * factor, seen / factor)
        if sampling.frequency_penalty or sampling.presence_penalty:
            scores -= sampling.frequency_penalty * self._counts + sampling.presence_penalty * (self._counts > 0)
        return scores

    def _restrict(self, scores: Array, settings: GenerationSettings) -> Array:
        """Leave the tokens that the settings of a model allow next."""
        forced = settings.find_forced(len(self.tokens) - 1)
        if forced is not None:
            return np.asarray(keep_only(scores[None], [forced])[0])
        return np.asarray(settings.restrict(scores[None], np.array([self.tokens]))[0], np.float64)

    def _draw(self, scores: Array) -> int:
        """Draw a token from what the settings leave."""
        shares = share_out(scores, self.sampling)
        tokens = np.flatnonzero(shares)
        sums = shares[tokens].cumsum()
        place = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return int(tokens[min(place, len(tokens) - 1)])


def measure_token(logits: Array, token: int, sampling: Sampling) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the logarithm of the probability that the model itself gave a token, and those of the likeliest, where
    they are asked for. logits: [vocabulary]."""
    count = min(sampling.top_logprobs, len(logits))
    if not count and not sampling.logprobs:
        return 0.0, ()
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    places = np.argpartition(scores, -count)[-count:] if count else np.empty(0, np.int64)
    places = places[np.lexsort((places, -scores[places]))]
    return float(scores[token]), tuple((int(place), float(scores[place])) for place in places)


def share_out(scores: Array, sampling: Sampling) -> Array:
    """Return the probability of each token, by temperature, top_k, top_p and min_p."""
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.partition(scores, -sampling.top_k)[-sampling.top_k]] = -np.inf
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    if sampling.top_p < 1:
        shares = keep_nucleus(shares, sampling.top_p)
    shares[shares < sampling.min_p * shares.max()] = 0
    return np.asarray(shares / shares.sum())


def keep_nucleus(shares: Array, top_p: float) -> Array:
    """Keep the likeliest tokens up to the first with which they have `top_p` of the probability together; others get 0.

    Tokens below (1 - top_p) / vocabulary never belong to them, and are left out before the others are sorted.
    """
    tokens = np.flatnonzero(shares >= (1 - top_p) / len(shares))
    order = tokens[np.argsort(shares[tokens], kind="stable")]
    below = 1 - shares[order].sum() + shares[order].cumsum()
    kept = np.zeros_like(shares)
    best = order[below > 1 - top_p] if top_p > 0 else order[-1:]
    best = best if len(best) else order[-1:]
    kept[best] = shares[best]
    return kept


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise InputError for settings out of their range."""
    in_range = (
        sampling.max_new_tokens >= 1
        and 0 <= sampling.temperature < np.inf
        and 0 <= sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
        and sampling.top_k >= 0
        and 0 < sampling.repetition_penalty < np.inf
        and np.isfinite([sampling.frequency_penalty, sampling.presence_penalty]).all()
        and all(np.isfinite(bias) for _, bias in sampling.logit_bias)
    )
    if not in_range:
        raise InputError("the engine does not take these settings of sampling: one is out of its range")
    outside = [token for token, _ in sampling.logit_bias if not 0 <= token < vocabulary]
    if outside:
        raise InputError(f"logit_bias names token {outside[0]}, and the model has 0 to {vocabulary - 1}")
