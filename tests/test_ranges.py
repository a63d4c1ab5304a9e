"""From the values of a tensor to the range that is worth representing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.quantize.ranges import HEADROOM, RANGE_METHODS
from compress.quantize.tensor_statistics import BINS, Histogram
from laconic.quantization.qparams import fake_quantize_activation

VALUES = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=60)


def filled(*batches, counted=True):
    histogram = Histogram(counted=counted)
    for batch in batches:
        histogram.add(np.array(batch, np.float32))
    return histogram


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_every_value_is_counted_and_the_ends_are_exact(batches):
    histogram = filled(*batches)
    values = np.concatenate([np.array(batch, np.float32) for batch in batches])
    assert histogram.counts.sum() == len(values)
    assert histogram.low == values.min()
    assert histogram.high == values.max()


@given(VALUES, VALUES)
def test_the_order_of_the_batches_does_not_matter_beyond_a_bin(first, second):
    one, other = filled(first, second), filled(second, first)
    assert one.reach == other.reach
    assert abs(one.quantile(0.5) - other.quantile(0.5)) <= 2 * (2 * one.reach / BINS) + 1e-6


@given(st.lists(VALUES, max_size=5))
def test_min_max_calibration_needs_no_counts(batches):
    whole, ends = filled(*batches), filled(*batches, counted=False)
    assert ends.is_empty == whole.is_empty == (not batches)
    assert not ends.counts.any()
    if batches:
        assert RANGE_METHODS["minmax"](ends) == RANGE_METHODS["minmax"](whole)


def test_memory_does_not_grow_with_the_batches_and_what_is_no_number_is_left_out():
    histogram = filled(*(np.random.default_rng(seed).normal(0, seed + 1, 1000) for seed in range(20)))
    assert histogram.counts.shape == (BINS,)
    histogram = filled([1.0, np.nan, np.inf, -2.0], [np.nan])
    assert (histogram.low, histogram.high, histogram.counts.sum()) == (-2.0, 1.0, 2)
    assert filled([np.nan]).is_empty


@pytest.mark.parametrize("method", RANGE_METHODS)
@settings(max_examples=30)
@given(VALUES)
def test_a_range_lies_within_what_was_seen(method, values):
    histogram = filled(values)
    found = RANGE_METHODS[method](histogram)
    low, high = HEADROOM * min(histogram.low, 0), HEADROOM * max(histogram.high, 0)
    assert low - 1e-3 <= found.low <= found.high <= high + 1e-3


@pytest.mark.parametrize("method", ["percentile", "mse", "entropy"])
def test_a_lone_outlier_is_clipped(method):
    normal = np.random.default_rng(0).normal(0, 1, 1_000_000).astype(np.float32)
    found = RANGE_METHODS[method](filled(normal, [100.0]))
    assert found.high < 80
    assert RANGE_METHODS["minmax"](filled(normal, [100.0])).high >= 100


def test_mse_loses_less_than_minmax_on_heavy_tails():
    values = np.random.default_rng(0).standard_t(3, 200_000).astype(np.float32)
    histogram = filled(values)
    errors = {}
    for method in ("minmax", "mse"):
        limits = RANGE_METHODS[method](histogram)
        errors[method] = np.mean((values - fake_quantize_activation(values, limits)) ** 2)
    assert errors["mse"] < errors["minmax"]
