import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from laconic.units import (
    Bytes,
    Seconds,
    Share,
    format_binary_bytes,
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_fidelity,
    format_percent,
    format_rate,
    format_seconds,
)

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


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (format_rate, 8.25, "8.25"),
        (format_rate, 412, "412"),
        (format_rate, 999.9, "1.00k"),
        (format_rate, 12_345, "12.3k"),
        (format_rate, 1.2e6, "1.20M"),
        (format_percent, 0.41, "41 %"),
        (format_percent, 0.004, "0.4 %"),
        (format_percent, 0.0, "0 %"),
        (format_binary_bytes, 3 * 2**30 // 2, "1.50 GiB"),
        (format_binary_bytes, 543 * 2**20, "0.53 GiB"),
        (format_binary_bytes, 5 * 2**20, "5 MiB"),
        (format_binary_bytes, 12, "12 B"),
        (format_bytes, 90.9e6, "90.9 MB"),
        (format_bytes, 0.96e9, "1.0 GB"),
        (format_bytes, 12, "12 B"),
        (format_count, 22.7e6, "22.7 M"),
        (format_count, 1.11e9, "1.1 G"),
        (format_count, 340, "340"),
        (format_seconds, 0.0032, "3.20 ms"),
        (format_seconds, 45e-6, "45 us"),
        (format_duration, 14.5, "14.5 s"),
        (format_duration, 200, "3 min 20 s"),
        (format_fidelity, 1.0, "1.00000"),
        (format_fidelity, 0.9999991, "0.999999"),
        (format_clock, 42, "0:42"),
        (format_clock, 3900, "1:05:00"),
    ],
)
def test_figures_are_written_for_people(function, value, text):
    assert function(value) == text
