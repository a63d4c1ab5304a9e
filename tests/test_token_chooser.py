"""Choosing tokens: what the settings leave is what the processors of transformers leave, and draws follow it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from laconic.errors import InputError
from laconic.runtimes.generator import GenerationRequest, Sampling
from laconic.runtimes.token_chooser import TokenChooser, check_sampling, share_out

VOCABULARY = 50


def draw_scores(seed: int, spread: float = 3.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, spread, VOCABULARY).astype(np.float32)


def make_chooser(sampling: Sampling, prompt: tuple[int, ...] = (1, 2, 3), index: int = 0) -> TokenChooser:
    return TokenChooser(GenerationRequest(1, prompt, sampling), index, VOCABULARY, prompt, None)


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 4),
    top_k=st.integers(0, VOCABULARY + 1),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_tokens_have_the_probabilities_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores = draw_scores(seed).astype(np.float64)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.int64), torch.from_numpy(scores)[None])[0].softmax(-1)
    sampling = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(share_out(scores, sampling), expected.numpy(), atol=1e-9)


def test_scores_are_changed_in_the_order_of_transformers() -> None:
    prompt, biases, factor = (1, 2, 3), {5: 4.0, 2: -3.0, 7: 1.5}, 1.8
    sampling = Sampling(30, repetition_penalty=factor, logit_bias=tuple(biases.items()))
    chooser = make_chooser(sampling, prompt)
    ids = list(prompt)
    bias = SequenceBiasLogitsProcessor({(token,): value for token, value in biases.items()})
    processors = LogitsProcessorList([bias, RepetitionPenaltyLogitsProcessor(factor)])
    for seed in range(30):
        scores = draw_scores(seed, 1.0)
        expected = int(processors(torch.tensor([ids]), torch.from_numpy(scores)[None].clone())[0].argmax())
        before = scores.copy()
        assert chooser.choose(scores).token == expected
        np.testing.assert_array_equal(scores, before)
        ids.append(expected)
    assert len(set(ids[3:])) > 5


def test_frequency_and_presence_penalties_are_taken_off_once_and_by_count() -> None:
    """mu[j] - c[j] * frequency_penalty - (c[j] > 0) * presence_penalty, of tokens of the choice alone."""
    chooser = make_chooser(Sampling(40, frequency_penalty=0.3, presence_penalty=-0.4))
    counts = np.zeros(VOCABULARY)
    scores = draw_scores(0, 0.5)
    for _ in range(40):
        token = chooser.choose(scores).token
        assert token == int((scores - 0.3 * counts + 0.4 * (counts > 0)).argmax())
        counts[token] += 1
    assert (counts > 1).sum() > 3


def test_draws_are_as_frequent_as_is_likely_and_follow_the_seed() -> None:
    scores = draw_scores(3)
    sampling = Sampling(5000, temperature=1.0, seed=11)
    chooser = make_chooser(sampling)
    drawn = [chooser.choose(scores).token for _ in range(4000)]
    counts = np.bincount(np.array(drawn), minlength=VOCABULARY) / len(drawn)
    assert np.abs(counts - share_out(scores.astype(np.float64), sampling)).sum() < 0.1
    shifted = make_chooser(Sampling(5000, temperature=1.0, seed=10), index=1)
    assert [shifted.choose(scores).token for _ in range(50)] == drawn[:50]
    negative = make_chooser(Sampling(5000, temperature=1.0, seed=-5))
    assert negative.choose(scores).token is not None


def test_extreme_scores_and_settings_leave_one_token() -> None:
    scores = draw_scores(4)
    best = int(scores.argmax())
    narrow: list[dict[str, Any]] = [
        {"top_p": 0.0},
        {"top_p": 5e-324},
        {"top_k": 1},
        {"min_p": 1.0},
        {"temperature": 5e-324},
    ]
    for settings in narrow:
        assert make_chooser(Sampling(9, **{"temperature": 1.0} | settings)).choose(scores).token == best
    huge = scores.copy()
    huge[7] = 3e38
    assert make_chooser(Sampling(9, temperature=0.002)).choose(huge).token == 7


def test_the_likeliest_are_in_order_and_no_more_than_there_are() -> None:
    scores = np.zeros(VOCABULARY, np.float32)
    scores[[9, 4]] = 2, 1
    chosen = make_chooser(Sampling(9, top_logprobs=4, logprobs=True)).choose(scores)
    assert [token for token, _ in chosen.likeliest[:2]] == [9, 4]
    assert chosen.logprob == chosen.likeliest[0][1] == pytest.approx(float(torch.from_numpy(scores).log_softmax(-1)[9]))
    assert len(make_chooser(Sampling(9, top_logprobs=99)).choose(scores).likeliest) == VOCABULARY


def test_a_choice_ends_at_its_limit_or_a_stop_token() -> None:
    scores = draw_scores(5)
    best = int(scores.argmax())
    chooser = make_chooser(Sampling(2))
    assert [chooser.choose(scores).finish_reason for _ in range(2)] == [None, "length"]
    assert make_chooser(Sampling(1, stop_token_ids=(best,))).choose(scores).finish_reason == "stop"


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": float("inf")},
        {"logit_bias": ((3, float("nan")),)},
    ],
)
def test_settings_out_of_their_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="out of its range"):
        check_sampling(Sampling(5, **settings), VOCABULARY)  # type: ignore[arg-type]
