import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from laconic.units import Bytes, Seconds, Share

SHARE, SECONDS, BYTES = TypeAdapter(Share), TypeAdapter(Seconds), TypeAdapter(Bytes)


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (SHARE, "1%", 0.01),
        (SHARE, "0.5 %", 0.005),
        (SHARE, 0.01, 0.01),
        (SHARE, "0.01", 0.01),
        (SHARE, 0, 0),
        (SHARE, 1, 1),
        (SECONDS, "3 ms", 0.003),
        (SECONDS, "250us", 0.00025),
        (SECONDS, "250 µs", 0.00025),
        (SECONDS, "0.5 s", 0.5),
        (SECONDS, "2 MIN", 120),
        (BYTES, "25 MB", 25_000_000),
        (BYTES, "8GiB", 8 * 2**30),
        (BYTES, 1000, 1000),
        (BYTES, "1000", 1000),
    ],
)
def test_what_people_write_is_understood(kind, written, value):
    assert kind.validate_python(written) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "written", "message"),
    [
        (SHARE, "1 ms", "expected a share as 1% or 0.01, got '1 ms'"),
        (SHARE, 1.5, "got 1.5"),
        (SHARE, "-1%", "got '-1%'"),
        (SHARE, "101%", "got '101%'"),
        (SHARE, True, "got True"),
        (SHARE, "nan", "got 'nan'"),
        (SHARE, float("nan"), "got nan"),
        (SHARE, None, "got None"),
        (SECONDS, 3, "expected a time with its unit, as 3 ms or 0.5 s, got 3"),
        (SECONDS, "3", "got '3'"),
        (SECONDS, "3 MB", "got '3 MB'"),
        (SECONDS, "0 ms", "got '0 ms'"),
        (SECONDS, "1.2.3 ms", "got '1.2.3 ms'"),
        (SECONDS, "ms", "got 'ms'"),
        (BYTES, "25 ms", "expected a size as 25 MB, 8 GiB or a number of bytes, got '25 ms'"),
        (BYTES, 0, "got 0"),
        (BYTES, -5, "got -5"),
        (BYTES, True, "got True"),
        (BYTES, None, "got None"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_was_expected(kind, written, message):
    with pytest.raises(ValidationError, match="expected a") as caught:
        kind.validate_python(written)
    assert message in str(caught.value)


@given(st.floats(1e-9, 1e6))
def test_seconds_are_written_so_that_they_read_back_the_same(seconds):
    assert SECONDS.validate_python(SECONDS.dump_python(seconds)) == seconds
