"""What the table of an artifact says beside the original's figures."""

import pytest

from laconic.artifacts.gain import compare_sizes


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [(90.9e6, 23.6e6, "3.9 x smaller"), (4200, 6200, "1.5 x larger"), (100, 100, "as large"), (100, 102, "as large")],
)
def test_a_size_is_so_many_times_smaller_or_larger_and_never_a_fraction_of_itself(before, after, words):
    assert compare_sizes(before, after) == words
