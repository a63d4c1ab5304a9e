import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from laconic.errors import InputError
from laconic.tensor import DTYPES, TensorSpec, check_inputs

AXES = ("batch", "seq", "height")


@st.composite
def specs(draw, name="x"):
    shape = tuple(draw(st.lists(st.one_of(st.integers(1, 4), st.sampled_from(AXES)), max_size=4)))
    bounds = {axis: (low := draw(st.integers(1, 3)), draw(st.integers(low, 6))) for axis in set(shape) & set(AXES)}
    return TensorSpec(name=name, dtype=draw(st.sampled_from(DTYPES)), shape=shape, bounds=bounds)


@given(specs(), st.data())
def test_whatever_a_spec_samples_fits_it(spec, data):
    sizes = {axis: data.draw(st.integers(*bounds)) for axis, bounds in spec.bounds.items()}
    seen = {}
    spec.check(spec.sample(np.random.default_rng(0), sizes), seen)
    assert seen == {axis: sizes[axis] for axis in spec.shape if isinstance(axis, str)}


@given(specs())
def test_a_sample_without_sizes_takes_the_lower_bounds(spec):
    array = spec.sample(np.random.default_rng(0), {})
    assert array.shape == tuple(axis if isinstance(axis, int) else spec.bounds[axis][0] for axis in spec.shape)


@given(specs())
def test_a_spec_survives_json(spec):
    assert TensorSpec.model_validate_json(spec.model_dump_json()) == spec


@given(specs(), st.data())
def test_a_size_out_of_bounds_is_refused_with_the_name_of_the_axis(spec, data):
    free = [axis for axis in spec.shape if isinstance(axis, str)]
    if not free:
        return
    axis = data.draw(st.sampled_from(free))
    array = spec.sample(np.random.default_rng(0), {axis: spec.bounds[axis][1] + 1})
    with pytest.raises(InputError, match=f"axis '{axis}'"):
        spec.check(array)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3)), "'x' is float64, expected float32"),
        (np.zeros(3, np.float32), r"shape \[3\], expected \[batch, 3\]"),
        (np.zeros((2, 4), np.float32), "axis 1 must be 3"),
        (np.zeros((0, 3), np.float32), "0 along axis 'batch', expected 1 to"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(array, message):
    with pytest.raises(InputError, match=message):
        TensorSpec(name="x", dtype="float32", shape=("batch", 3)).check(array)


def test_unknown_dtypes_and_tensors_that_are_missing_or_disagree_are_named():
    with pytest.raises(ValidationError, match="unknown dtype 'float8'"):
        TensorSpec(name="x", dtype="float8", shape=())
    pair = tuple(TensorSpec(name=name, dtype="int64", shape=("batch", "seq")) for name in ("ids", "mask"))
    good = {"ids": np.ones((2, 5), np.int64), "mask": np.ones((2, 5), np.int64)}
    check_inputs(pair, good)
    with pytest.raises(InputError, match="'mask' has 4 along axis 'seq', another input has 5"):
        check_inputs(pair, good | {"mask": np.ones((2, 4), np.int64)})
    spec = (TensorSpec(name="x", dtype="float32", shape=("batch",)),)
    with pytest.raises(InputError, match=r"missing \['x'\]"):
        check_inputs(spec, {})
    with pytest.raises(InputError, match=r"unknown \['y'\]"):
        check_inputs(spec, {"x": np.ones(1, np.float32), "y": np.ones(1, np.float32)})
