"""Which requests share a batch, and how they are joined and cut apart."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.tensor import TensorSpec
from serve.batching.fair_queue import FairQueue, Item
from serve.batching.layout import Batch, Cap, Layout, round_up

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


def test_without_free_axes_the_cap_is_in_rows_and_a_request_over_it_runs_alone():
    assert Cap(8).rows_at({}) == 8
    assert Cap(8, 0).rows_at({"seq": 3}) == 8
    batch = Batch(LAYOUT, Cap(4, 512))
    assert batch.add(part(9, 128))
    assert batch.full
    assert not batch.add(part(1, 128))
    layout = Layout((TOKENS,), (STATES,), {}, rounded=True)
    assert layout.join_inputs([layout.make_part({"ids": np.ones((2, 7), np.int64)})])["ids"].shape == (2, 7)


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


def test_free_axes_are_rounded_up_within_their_bounds():
    bounded = TOKENS.model_copy(update={"bounds": {"seq": (1, 39)}})
    layout = Layout((bounded,), (STATES,), {"ids": 0}, rounded=True)
    for length, padded in ((1, 2), (16, 16), (17, 18), (33, 36), (38, 39), (39, 39)):
        parts = [layout.make_part({"ids": np.ones((2, length), np.int64)})]
        joined = layout.join_inputs(parts)["ids"]
        assert joined.shape == (2, padded)
        assert joined.sum() == 2 * length
        (answer,) = layout.split_outputs({"states": np.ones((2, padded, 2), np.float32)}, parts)
        assert answer["states"].shape == (2, length, 2)


@given(st.integers(3, 5000))
def test_rounding_adds_little_and_leaves_few_sizes(size):
    assert size <= round_up(size) < 1.125 * size + 1
    assert len({round_up(other) for other in range(1, size)}) <= 16 + 8 * size.bit_length()


def form_batches(layout, lengths, waiting=64):
    """The batches of requests of one row with these lengths, of which so many wait at a time. No request starves."""
    queue, arrivals, batches = FairQueue(layout, Cap(4, 512)), iter(enumerate(lengths)), []

    def arrive(count):
        for number, length in itertools.islice(arrivals, count):
            flow = queue.open(1)
            queue.announce(flow)
            queue.put(flow, [Item(flow, layout.make_part({"ids": np.full((1, length), number)}), None)])

    arrive(waiting)
    while batch := queue.form_small(with_bulk=False):
        batches.append([item.part for item in batch])
        arrive(len(batch))
    return batches


MIXES = {
    "even": lambda rng, count: rng.integers(4, 257, count),
    "texts": lambda rng, count: np.clip(np.exp(rng.normal(3.3, 0.8, count)).astype(int), 4, 256),
    "two kinds": lambda rng, count: rng.choice([6, 250], count),
}


@pytest.mark.parametrize("mix", MIXES)
def test_padding_is_less_than_a_tenth_of_what_is_computed(mix):
    layout = Layout((TOKENS,), (STATES,), {"ids": 0}, rounded=True)
    batches = form_batches(layout, MIXES[mix](np.random.default_rng(0), 2000))
    computed = sum(layout.join_inputs(parts)["ids"].size for parts in batches)
    needed = sum(part.cells for parts in batches for part in parts)
    assert 1 - needed / computed < 0.1
    assert sum(map(len, batches)) == 2000
    assert len(batches) < 1600


@given(st.lists(st.integers(1, 256), min_size=1, max_size=100))
def test_no_length_starves(lengths):
    """The request that waits longest opens the next batch, so with 8 waiting each is in one of the next 8 batches."""
    layout = Layout((TOKENS,), (STATES,), {"ids": 0}, rounded=True)
    taken = [int(part.inputs["ids"][0, 0]) for parts in form_batches(layout, lengths, waiting=8) for part in parts]
    assert sorted(taken) == list(range(len(lengths)))
    assert max(position - number for position, number in enumerate(taken)) <= 8 * 8
