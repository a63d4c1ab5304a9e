"""Intervals of shares, means and changes: never of no width, narrower with more samples, and true to what is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from export.validation.intervals import (
    count_needed_samples,
    find_change_interval,
    find_mean_interval,
    find_paired_share_interval,
    find_share_interval,
    find_unseen_change,
    find_unseen_share,
)
from laconic.metrics import Scorer, make_f1_scorer, make_mean_scorer, make_r2_scorer, make_scorer

counts = (
    st.integers(1, 500)
    .flatmap(lambda samples: st.tuples(st.integers(0, samples), st.integers(0, samples), st.just(samples)))
    .filter(lambda drawn: drawn[0] + drawn[1] <= drawn[2])
)


def answers(right, samples):
    return make_mean_scorer((np.arange(samples) < right).astype(np.float64))


@pytest.mark.parametrize(("samples", "share"), [(3, 0.71), (10, 0.31), (100, 0.036), (400, 0.0092), (4000, 0.00092)])
def test_what_no_sample_showed_may_happen_by_the_rule_of_three(samples, share):
    assert find_unseen_share(samples) == pytest.approx(share, rel=0.02)
    assert find_share_interval(0, samples)[1] == pytest.approx(find_unseen_share(samples))


@given(counts)
def test_the_interval_of_a_paired_change_holds_it_is_never_of_no_width_and_has_a_mirror(drawn):
    gained, lost, samples = drawn
    low, high = find_paired_share_interval(gained, lost, samples)
    assert -1 <= low <= (gained - lost) / samples <= high <= 1
    assert high - low > 1 / samples
    mirrored = find_paired_share_interval(lost, gained, samples)
    assert mirrored == pytest.approx((-high, -low))


def test_three_samples_say_next_to_nothing_of_a_drop():
    low, high = find_change_interval(answers(3, 3), answers(3, 3))
    assert low < -0.5
    assert high > 0.5


def test_four_hundred_samples_without_a_difference_show_that_no_point_is_lost():
    low, _ = find_change_interval(answers(380, 400), answers(380, 400))
    assert -0.01 < low < -0.009
    assert find_change_interval(answers(380, 400), answers(379, 400))[0] < -0.01


def test_counted_metrics_take_no_bootstrap_and_others_do():
    before, after = answers(90, 100), answers(85, 100)
    assert find_change_interval(before, after, seed=0) == find_change_interval(before, after, seed=1)
    parts = make_mean_scorer(np.linspace(0, 1, 100)), make_mean_scorer(np.linspace(0, 0.9, 100))
    assert find_change_interval(*parts, seed=0) != find_change_interval(*parts, seed=1)


def test_a_bootstrap_is_as_wide_as_a_normal_interval_and_what_is_unseen():
    rng = np.random.default_rng(0)
    before, after = rng.uniform(0, 1, 1000), rng.uniform(0, 1, 1000)
    low, high = find_change_interval(make_mean_scorer(before), make_mean_scorer(after))
    change = (after - before).mean()
    half = np.hypot(1.96 * stats.sem(after - before), find_unseen_share(1000))
    assert (change - low, high - change) == pytest.approx((half, half), rel=0.15)


def test_rows_of_two_samples_are_one_observation():
    rng = np.random.default_rng(0)
    values = np.repeat(rng.uniform(0, 1, 100), 2), np.repeat(rng.uniform(0, 1, 100), 2)
    scorers = [make_scorer(lambda index, each=each: float(each[index].mean()), 200) for each in values]
    apart, paired = (find_change_interval(*scorers, per_row=rows) for rows in (1, 2))
    assert paired[1] - paired[0] > 1.25 * (apart[1] - apart[0])


def test_what_is_unseen_counts_the_samples_that_bear_on_a_metric():
    nothing = np.zeros(400, int)
    one_in_ten = np.where(np.arange(400) % 10 == 0, 1, 0)
    assert find_unseen_change(make_f1_scorer(nothing, nothing, nothing)) == 1.0, "no entity says nothing of entities"
    assert find_unseen_change(make_f1_scorer(one_in_ten, one_in_ten, one_in_ten)) == pytest.approx(
        find_unseen_share(40)
    )
    assert find_unseen_change(make_mean_scorer(np.ones(400))) == pytest.approx(find_unseen_share(400))
    classes = Scorer(lambda index: 1.0, np.array([np.ones(400), np.arange(400) < 4]))
    assert find_unseen_change(classes) == pytest.approx(find_unseen_share(4) / 2), "half of a mean over two classes"


def test_equal_answers_still_have_an_interval():
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=(100, 1))
    scorer = make_r2_scorer(wanted + 0.1, wanted)
    low, high = find_change_interval(scorer, scorer)
    assert (low, high) == pytest.approx((-find_unseen_share(100), find_unseen_share(100)))


def test_the_mean_of_few_values_may_be_anything_and_that_of_many_is_known():
    assert find_mean_interval(np.full(3, 0.999))[0] < 0.3
    values = np.random.default_rng(0).uniform(0.99, 1, 400)
    low, high = find_mean_interval(values)
    assert values.mean() - 0.0005 < low < values.mean() < high < values.mean() + 0.0005


def test_about_as_many_samples_as_are_said_to_tell_do_tell():
    interval = find_paired_share_interval(2, 5, 400)
    needed = count_needed_samples(interval, -3 / 400, -0.01, 400)
    assert needed > 400
    factor = needed / 400
    low, _ = find_paired_share_interval(round(2 * factor), round(5 * factor), needed)
    assert low > -0.0105
    for few in (3, 20, 100):
        assert count_needed_samples(find_paired_share_interval(0, 0, few), 0.0, -0.01, few) == 370
    assert count_needed_samples((-0.02, 0.0), -0.01, -0.01, 400) is None, "no number of samples tells equal ones apart"
