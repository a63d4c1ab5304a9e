"""The prefix cache of the stepped engine, without an engine: what is found, and what is forgotten first."""

import numpy as np
import pytest

from laconic.arrays import Array
from laconic.runtimes.prefix_cache import PrefixCache

SHAPE = ((2, 3), (1, 5))
BLOCK = 4


def make_past(tokens: list[int], rows: int = 1, padding: int = 0) -> list[Array]:
    """A past that says which token each number is of; the last row is that of the text."""
    past = []
    for heads, width in SHAPE:
        numbers = np.array([0] * padding + tokens, np.float32)[None, None, :, None]
        past.append(np.arange(rows)[:, None, None, None] * numbers + np.zeros((rows, heads, 1, width), np.float32))
    return past


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(BLOCK)


def keep(cache: PrefixCache, tokens: list[int], most: int = 100) -> None:
    cache.keep(tokens, make_past(tokens, rows=2, padding=3), 1, most)


def test_the_longest_common_beginning_in_whole_blocks_is_found(cache: PrefixCache) -> None:
    text = list(range(1, 15))
    keep(cache, text)
    assert len(cache) == 3
    for tokens, expected in (
        (text, 12),
        (text[:12], 8),  # the logits behind the last token must be computed
        ([*text[:11], 99, 99, 99], 8),
        ([99, *text], 0),
        (text[4:], 0),  # a block is of use behind its own beginning alone
        ([], 0),
    ):
        count, past = cache.find(tokens)
        assert count == expected
        expected_past = [array[1:] for array in make_past(text[:count], rows=2)] if count else []
        assert len(past) == len(expected_past)
        assert all(np.array_equal(*pair) for pair in zip(past, expected_past, strict=True))


def test_what_was_used_least_recently_goes_first_and_ends_before_beginnings(cache: PrefixCache) -> None:
    first, second = [1] * 13, [2] * 13
    keep(cache, first)
    keep(cache, second)
    cache.find(first)
    cache.trim(4)
    assert [cache.find(text)[0] for text in (first, second)] == [12, 4]
    cache.trim(2)
    assert [cache.find(text)[0] for text in (first, second)] == [4, 4]
    keep(cache, [3] * 40, most=3)
    assert len(cache) == 3
    assert cache.find([3] * 40)[0] == 12
    for most in (0, -4):
        keep(cache, first, most=most)
        assert len(cache) == 0
