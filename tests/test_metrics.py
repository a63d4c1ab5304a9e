import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from laconic.metrics import (
    cosine,
    cosine_matrix,
    find_nearest_neighbours,
    overlap,
    ranks,
    softmax,
    spearman,
)
from laconic.timing.measurements import find_knee

values = st.floats(-1e3, 1e3, width=32)
few = st.lists(st.integers(-3, 3), min_size=3, max_size=30)


@given(few)
def test_ranks_are_those_of_scipy(numbers):
    assert np.array_equal(ranks(np.array(numbers)), stats.rankdata(numbers) - 1)


@given(st.integers(3, 30).flatmap(lambda n: st.tuples(*[st.lists(st.integers(-3, 3), min_size=n, max_size=n)] * 2)))
def test_spearman_is_that_of_scipy(pair):
    a, b = map(np.array, pair)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert spearman(a, b) == float(np.array_equal(a, b))
    else:
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-9)


@given(arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 4)), elements=values))
def test_every_answer_is_like_itself(answers):
    assert cosine(answers, answers) == pytest.approx(np.ones(len(answers)))
    assert overlap(answers, answers) == pytest.approx(np.ones(len(answers)))
    assert softmax(answers).sum(-1) == pytest.approx(np.ones(len(answers)))


def test_cosine_and_overlap_and_neighbours_know_opposite_and_zero_vectors():
    a = np.array([[1.0, 0], [0, 0], [0, 0]])
    b = np.array([[-2.0, 0], [0, 0], [1, 0]])
    assert cosine(a, b).tolist() == [-1, 1, 0]
    a, b = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    assert overlap(a, b) == pytest.approx([0.6])
    vectors = np.array([[1.0, 0], [0.9, 0.1], [0, 1]])
    assert find_nearest_neighbours(vectors).tolist() == [1, 0, 1]
    assert np.diag(cosine_matrix(vectors)) == pytest.approx(np.ones(3))


@given(st.dictionaries(st.integers(1, 256), st.floats(1e-4, 10), min_size=1), st.floats(0, 0.5))
def test_the_knee_is_within_its_slack_and_nothing_smaller_is(seconds, slack):
    found = find_knee(seconds, slack=slack)
    best = max(batch / time for batch, time in seconds.items())
    assert found / seconds[found] >= (1 - slack) * best
    assert all(batch / time < (1 - slack) * best for batch, time in seconds.items() if batch < found)
