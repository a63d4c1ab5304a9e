import pytest
from artifacts import FAILED, PASSED
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from laconic.artifacts.verdict import Comparison, Verdict
from laconic.hardware import cores, this_machine
from laconic.hashing import hash_of


def compare(figure, required):
    return Comparison(subject="a", against="b", samples=1, figures={"mean": figure}, required={"mean": required})


def test_a_verdict_passes_where_every_comparison_does_and_says_what_failed():
    assert PASSED.passed
    assert not PASSED.failures
    assert not FAILED.passed
    assert FAILED.failures == ["artifact against original: mean is 0.5, required 0.9"]
    assert not compare(float("nan"), 0).passed
    empty = Verdict(parity=(), drift=())
    assert not empty.passed
    assert empty.failures == ["nothing was compared"]


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_figure_passes_where_it_is_as_high_as_required(figure, required):
    assert compare(figure, required).passed == (figure >= required)


def test_a_figure_that_was_required_and_not_measured_is_an_error():
    with pytest.raises(ValidationError, match="mean is required, and not among the figures"):
        Comparison(subject="a", against="b", samples=1, figures={}, required={"mean": 1})


def test_a_verdict_without_a_check_of_the_engine_is_by_reference_execution():
    drift = (compare(1, 0.9),)
    checked = drift[0].model_copy(update={"check": "engine", "subject": "engine"})
    assert Verdict(parity=(), drift=drift).by_reference
    assert not Verdict(parity=(checked,), drift=drift).by_reference
    assert not Verdict(parity=(), drift=()).by_reference


def test_a_key_does_not_depend_on_the_order_of_a_mapping():
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1}) != hash_of({"a": 2, "b": 1})
    assert hash_of("a", "b") != hash_of("ab")


def test_this_machine_says_what_speed_depends_on():
    machine = this_machine()
    assert machine.cores == cores() >= 1
    assert machine.memory > 0
    assert machine.processor
    assert machine == this_machine()
