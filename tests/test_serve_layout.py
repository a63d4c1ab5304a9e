"""Which requests share a batch, and how they are joined and cut apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.tensor import TensorSpec
from serve.layout import Batch, Cap, Layout

TOKENS = TensorSpec(name="ids", dtype="int64", shape=("batch", "seq"))
STATES = TensorSpec(name="states", dtype="float32", shape=("batch", "seq", 2))
LAYOUT = Layout((TOKENS,), (STATES,), {"ids": 0})


def part(rows, length, fill=1):
    return LAYOUT.make_part({"ids": np.full((rows, length), fill, np.int64)})


@pytest.mark.parametrize(("length", "rows"), [(128, 4), (64, 8), (32, 16), (1, 512), (256, 4)])
def test_shorter_requests_share_larger_batches_of_the_same_cost(length, rows):
    batch = Batch(LAYOUT, Cap(4, 4 * 128))
    taken = 0
    while batch.add(part(1, length)):
        taken += 1
    assert taken == rows
    assert batch.full


def test_without_free_axes_the_cap_is_in_rows():
    assert Cap(8).rows_at({}) == 8
    assert Cap(8, 0).rows_at({"seq": 3}) == 8


def test_a_single_request_over_the_cap_runs_alone():
    batch = Batch(LAYOUT, Cap(4, 512))
    assert batch.add(part(9, 128))
    assert batch.full
    assert not batch.add(part(1, 128))


@given(st.integers(1, 70), st.integers(1, 300))
def test_the_parts_of_a_request_fit_the_cap_and_hold_all_of_it(rows, length):
    cap = Cap(4, 512)
    ids = np.arange(rows * length, dtype=np.int64).reshape(rows, length)
    parts = LAYOUT.split_request({"ids": ids}, cap)
    assert max(each.rows for each in parts) <= cap.rows_at({"seq": length})
    assert np.array_equal(np.concatenate([each.inputs["ids"] for each in parts]), ids)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=6))
def test_what_is_joined_is_cut_apart_again(sizes):
    parts = [part(rows, length, fill=number + 1) for number, (rows, length) in enumerate(sizes)]
    joined = LAYOUT.join_inputs(parts)["ids"]
    states = np.repeat(joined[:, :, None].astype(np.float32), 2, axis=2)
    for number, (answer, each) in enumerate(zip(LAYOUT.split_outputs({"states": states}, parts), parts, strict=True)):
        assert answer["states"].shape == (*each.inputs["ids"].shape, 2)
        assert (answer["states"] == number + 1).all()


def test_free_axes_are_padded_up_to_a_step_within_their_bounds():
    bounded = TOKENS.model_copy(update={"bounds": {"seq": (1, 40)}})
    layout = Layout((bounded,), (STATES,), {"ids": 0}, step=16)
    for length, padded in ((1, 16), (16, 16), (17, 32), (33, 40), (40, 40)):
        parts = [layout.make_part({"ids": np.ones((2, length), np.int64)})]
        joined = layout.join_inputs(parts)["ids"]
        assert joined.shape == (2, padded)
        assert joined.sum() == 2 * length
        (answer,) = layout.split_outputs({"states": np.ones((2, padded, 2), np.float32)}, parts)
        assert answer["states"].shape == (2, length, 2)


def test_what_nothing_may_fill_keeps_its_size():
    layout = Layout((TOKENS,), (STATES,), {}, step=16)
    assert layout.join_inputs([layout.make_part({"ids": np.ones((2, 7), np.int64)})])["ids"].shape == (2, 7)
